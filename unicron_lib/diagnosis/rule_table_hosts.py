"""What the kernel and schedulers say of a host: its memory, its disks and file systems, that it is gone.

A row: name, kind, role, alternatives of its pattern, a line that it is found in.
"""

from unicron_lib.diagnosis.rule_table_hardware import Row
from unicron_lib.domain.failures import ErrorKind

_K = ErrorKind

ROWS: tuple[Row, ...] = (
    (
        "memory-controller",
        _K.ECC_ERROR,
        "root",
        (
            r"[Uu]ncorrectable (?:DIMM|DRAM|system) (?:memory )?(?:ECC )?error",
            r"EDAC \S{1,32}: [1-9]\d{0,9} UE ",
            r"[Uu]ncorrected hardware memory error",
            r"hardware memory corruption",
            r"\[Hardware Error\]:[^\n]{0,80}[Uu]ncorrect(?:ed|able)[^\n]{0,40}(?:memory|DRAM|ECC)",
        ),
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
    ),
    (
        "host-oom",
        _K.OUT_OF_MEMORY,
        "root",
        (
            r"\bOOM[- ]?[Kk]illed\b(?!\"?\s{0,2}[:=]\s{0,2}\"?(?:[Ff]alse|0))",
            r"TERM_MEMLIMIT",
            r"job killed: v?mem [^\n]{0,40}exceed",
            (
                r"(?:Memory cgroup out of memory|Out of memory)(?: \([\w ]{1,16}\))?: Kill(?:ed)? process \d{1,10} "
                r"\((?:python|pt_|torchrun|deepspeed|megatron|ray|train|accelerate|pretrain|pt-|MainThread|"
                r"Thread)[^)]{0,16}\)"
            ),
            (
                r"oom-kill:constraint=[^\n]{1,400}task=(?:python|pt_|torchrun|deepspeed|megatron|ray|train|accelerate|"
                r"pretrain)"
            ),
            r"oom_reaper: reaped process \d{1,10} \((?:python|pt_|torchrun|deepspeed|megatron|ray|train)[^)]{0,16}\)",
            r"[Dd]etected \d{1,9} oom[_-]kill events?",
            r"Some of (?:your processes|the step tasks) (?:may have|have) been (?:OOM Killed|killed by the cgroup)",
            r"systemd-oomd\[\d{1,9}\]: Killed",
            r"(?:due to|because of) memory pressure",
            r"running low on memory",
            r"(?:python\d?(?:\.\d{1,2})?|pt_\w{1,20}) invoked oom-killer",
            r"OUT_OF_MEMORY\b[^\n]{0,40}(?:slurm|job|State)",
            r"(?:State|state)[=: ]{1,3}OUT_OF_MEMORY",
            r"[Ee]xceeded (?:job|step) memory limit",
            r"Killed process \d{1,10},? (?:UID \d{1,10},? )?\((?:python|pt_|torchrun)",
        ),
        "Out of memory: Killed process 48231 (python3) total-vm:412345678kB, anon-rss:398765432kB",
    ),
    (
        "other-oom",
        _K.OUT_OF_MEMORY,
        "cascade",
        (r"Out of memory: Kill(?:ed)? process \d{1,10} \(",),
        "Out of memory: Killed process 811 (node_exporter) total-vm:1234kB",
    ),
    (
        "node-gone",
        _K.NODE_LOST,
        "root",
        (
            r"has been marked dead because",
            r"its node (?:has )?died",
            r"[Nn]ode status is now: NodeNotReady",
            r"Fatal (?:local )?machine check",
            r"[Nn]ode \S{1,64} (?:has )?(?:crashed|rebooted unexpectedly|unexpectedly rebooted)",
            r"Node unexpectedly rebooted",
            r"\bNODE_FAIL\b",
            r"DUE TO NODE FAILURE",
            r"[Nn]ode failure on \S{1,64}",
            r"NodeNotReady",
            r"node (?:is )?not ready",
            r"[Nn]ode \S{1,64} (?:is )?(?:not responding|unreachable|lost)\b",
            r"Kernel panic - not syncing",
            r"watchdog: BUG: soft lockup",
            r"[Hh]ard LOCKUP",
        ),
        "srun: error: Node failure on gpu-node-17",
    ),
    (
        "task-blocked",
        _K.TASK_HANG,
        "cascade",
        (r"INFO: task \S{1,64} blocked for more than \d{1,6} seconds",),
        "INFO: task python:4242 blocked for more than 120 seconds.",
    ),
    (
        "disk",
        _K.STORAGE_ERROR,
        "root",
        (
            r"This client was evicted",
            (
                r"\bnvme nvme\d{1,3}: (?:I/O[^\n]{0,40}timeout|controller is down|[Rr]emoving after probe failure|"
                r"Device not ready)"
            ),
            r"(?:GPFS|mmfs\w{0,3}|mmfsd)\b[^\n]{0,100}(?:[Ff]ailure|[Ff]ailed|[Uu]nmounted|panic)",
            (
                r"(?:WekaFS|wekafs|weka|BeeGFS|beegfs|juicefs|JuiceFS|cephfs|ceph-fuse|gcsfuse|s3fs|goofys|"
                r"mountpoint-s3)\b[^\n]{0,100}(?:IO (?:stopped|error)|I/O error|unreachable|[Cc]ommunication error)"
            ),
            r"Cannot send after transport endpoint shutdown",
            r"Host is down\b",
            r"low on resource: ephemeral-storage",
            r"\b[Nn]o space left\b",
            r"(?:[Dd]isk|[Uu]ser|[Gg]roup|[Pp]roject|[Ff]ile|[Bb]lock|[Ss]torage|Failure:) [Qq]uota exceeded\b",
            r"(?:mount\.\w{2,12}|mount): [^\n]{1,200}(?:timed out|failed|No such device|access denied)",
            r"No space left on device",
            r"Disk quota exceeded",
            r"Stale (?:NFS )?file handle",
            r"Input/output error",
            r"Read-only file system",
            r"nfs: server \S{1,128} not responding, timed out",
            r"Remote I/O error",
            r"Remounting filesystem read-only",
            r"Transport endpoint is not connected",
            r"PytorchStream(?:Reader|Writer) failed",
            r"EXT4-fs error",
            r"XFS \([^)]{1,64}\):[^\n]{0,80}(?:I/O [Ee]rror|[Ss]hutting down)",
            r"(?:I/O|medium) error, dev ",
            r"Buffer I/O error on ",
            r"LustreError:",
            r"Lustre:[^\n]{0,120}was lost",
            r"basic_ios::clear: iostream error",
        ),
        "OSError: [Errno 28] No space left on device: '/checkpoints/iter_0002000'",
    ),
    (
        "nfs-silent",
        _K.STORAGE_ERROR,
        "root",
        (r"nfs: server \S{1,128} not responding",),
        "nfs: server nfs-data not responding, still trying",
    ),
)
