"""What the kernel, the driver and the tools around them say of broken hardware and of nodes that go away.

A row: name, kind, role, alternatives of its pattern, a line that it is found in. Xids have a table of their own.
"""

from unicron_lib.diagnosis.findings import Role
from unicron_lib.domain.failures import ErrorKind

Row = tuple[str, ErrorKind, Role, tuple[str, ...], str]
_K = ErrorKind
CUDA_SAYS = (
    r"(?:C[Uu][Dd][Aa] (?:driver )?[Ee]rror(?: ?[\d(/][^\n:']{0,64})?[:'] ?'?|Cuda failure (?:\d{1,4} )?'?|"
    r"[Cc]uda runtime error \(\d{1,4}\) ?: |Triton Error \[CUDA\]: )[^\n]{0,32}?"
)
"""Who speaks before the driver's own words."""
_CUDA = CUDA_SAYS

ROWS: tuple[Row, ...] = (
    (
        "cuda-ecc",
        _K.ECC_ERROR,
        "root",
        (
            _CUDA + r"(?:uncorrectable ECC|double.bit ECC|ECC error)",
            r"uncorrectable ECC error encountered",
            r"ECCUncorrectable\b",
        ),
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    (
        "ecc-counted",
        _K.ECC_ERROR,
        "root",
        (
            (
                r"(?:[Dd]ouble.[Bb]it|[Uu]ncorrectable|[Uu]ncorrected|DBE|volatile)[^\n]{0,40} (?:ECC|memory) "
                r"errors?[^\n]{0,40}(?:detected|found|encountered|occurred|reported)"
            ),
            r"ECC[_ ]UNCORRECTABLE[A-Z_]{0,40}\b(?! ?[:=] ?0\b)",
            r"[Dd]etected [1-9]\d{0,9} [^\n]{0,30}(?:uncorrectable|double.bit)[^\n]{0,30}(?:ECC|memory) errors?",
            r"[Rr]ow remap(?:ping)? fail(?:ed|ure)",
            r"[Vv]olatile[^\n]{0,40}[Uu]ncorrect\w{2,5}\b[^\n]{0,20}[:|=] {0,4}[1-9]",
            r"\bECC errors?\b[^\n]{0,60}(?:[Dd]ouble|[Uu]ncorrect|DBE|fatal)",
        ),
        "dcgm-health: GPU 3: Detected 2 volatile double-bit ECC error(s) in GPU 3",
    ),
    (
        "memory-controller",
        _K.ECC_ERROR,
        "root",
        (
            r"EDAC \S{1,32}: [1-9]\d{0,9} UE ",
            r"[Uu]ncorrected hardware memory error",
            r"hardware memory corruption",
            r"\[Hardware Error\]:[^\n]{0,80}[Uu]ncorrect(?:ed|able)[^\n]{0,40}(?:memory|DRAM|ECC)",
        ),
        "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
    ),
    (
        "cuda-nvlink",
        _K.NVLINK_ERROR,
        "root",
        (
            _CUDA + r"(?:[Nn][Vv][Ll]ink|NVLINK)",
            r"uncorrectable NVLink error",
            r"NVLINK_UNCORRECTABLE",
            r"NvlinkUncorrectable",
        ),
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    (
        "nvswitch-fatal",
        _K.NVLINK_ERROR,
        "root",
        (r"SXid \([^)]{1,64}\): \d{1,9}, Fatal",),
        "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 22013, Fatal, Link 45 Minion Link DLREQ interrupt",
    ),
    (
        "nvlink-down",
        _K.NVLINK_ERROR,
        "root",
        (
            (
                r"(?:[Ff]abric ?[Mm]anager|fabricmanager)[^\n]{0,120}(?:fatal|NVLink[^\n]{0,40}(?:fail|down|error)|"
                r"[Ff]abric[^\n]{0,40}fail)"
            ),
            (
                r"\b[Nn][Vv][Ll](?:ink|INK)s?\b[^\n]{0,60}\b(?:(?:is|are) (?:currently )?(?:down|inactive)|went down|"
                r"fatal error|uncorrectable|training fail\w{0,4})"
            ),
            r"(?:fatal|uncorrectable)[^\n]{0,40}\b[Nn][Vv][Ll](?:ink|INK)\b[^\n]{0,20}error",
        ),
        "nvidia-fabricmanager[1207]: detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id",
    ),
    (
        "dma-refused",
        _K.INVALID_DMA_MAPPING,
        "root",
        (
            r"NVRM:[^\n]{0,160}(?:DMA|dma) mapping",
            r"invalid DMA mapping",
            r"DMAR: \[DMA (?:Read|Write)",
            r"IO_PAGE_FAULT",
            r"[Ii][Oo][Mm][Mm][Uu][^\n]{0,60}(?:page fault|DMA fault|translation fault)",
            r"swiotlb[^\n]{0,80}(?:buffer is full|overflow)",
            r"DMA-API:[^\n]{0,120}(?:mapping error|not mapped|invalid)",
            r"(?:dma_map_\w{1,20}|DMA map(?:ping)?)[^\n]{0,40}fail",
            r"[Ff]ailed to (?:DMA )?map[^\n]{0,40}(?:DMA|dma)",
            r"NVRM:[^\n]{0,80}nv_(?:dma|get_p2p)[^\n]{0,80}(?:fail|error)",
            r"p2p_dma_map\w{0,20}[^\n]{0,40}(?:fail|error)",
        ),
        (
            "DMAR: [DMA Write NO_PASID] Request device [3b:00.0] fault addr 0x7f2c00000 [fault reason 0x05] PTE "
            "Write access is not set"
        ),
    ),
    (
        "cuda-dma",
        _K.INVALID_DMA_MAPPING,
        "root",
        (
            _CUDA + r"(?:DMA|mapping of buffer object failed)",
            r"cudaErrorMapBufferObjectFailed",
            r"CUDA_ERROR_MAP_FAILED",
        ),
        "RuntimeError: CUDA error: mapping of buffer object failed",
    ),
    (
        "off-the-bus",
        _K.GPU_LOST,
        "root",
        (r"(?:GPU has )?fallen off the bus",),
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
    ),
    (
        "gpu-is-lost",
        _K.GPU_LOST,
        "root",
        (
            r"GPU is lost\b",
            r"Unable to determine the device handle for GPU[^\n]{0,80}(?:lost|Unknown Error|Not Found)",
            _CUDA + r"no CUDA-capable device",
            r"NVML_ERROR_GPU_IS_LOST",
            r"NVMLError_GpuIsLost",
            r"No CUDA GPUs are available",
            r"GPU[^\n]{0,60} (?:has disappeared|is no longer (?:detected|visible|present))",
            r"CUDA_ERROR_NO_DEVICE",
        ),
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU",
    ),
    (
        "driver-init",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            r"RmInitAdapter failed",
            r"rm_init_adapter failed",
            r"Driver/library version mismatch",
            r"NVML_ERROR_LIB_RM_VERSION_MISMATCH",
            r"CUDA driver initialization failed",
            r"CUDA driver version is insufficient",
            r"Found no NVIDIA driver on your system",
            r"couldn't communicate with the NVIDIA driver",
            r"could not insert '?nvidia",
            r"nvidia-container-cli: [^\n]{0,60}(?:driver|nvml) (?:error|not)",
            r"(?:nvml|NVML)[^\n]{0,20}: (?:driver not loaded|Driver Not Loaded)",
            (
                r"NVRM:[^\n]{0,80}(?:_kgspRpcRecvPoll|GSP[^\n]{0,40}(?:timeout|timed out|failed)|GPU recovery|Timeout "
                r"waiting for RPC)"
            ),
            r"NVRM: API mismatch",
        ),
        "NVRM: GPU 0000:86:00.0: RmInitAdapter failed! (0x62:0x40:2477)",
    ),
    (
        "cuda-driver",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            _CUDA
            + (
                r"(?:driver shutting down|initialization error|system not yet initialized|system has unsupported "
                r"display driver|driver version is insufficient|unknown error|forward compatibility was attempted)"
            ),
            r"CUDA unknown error - this may be due to",
        ),
        "RuntimeError: CUDA error: unknown error",
    ),
    (
        "cuda-init",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            (
                r"CUDA initialization: (?:Unexpected error|CUDA unknown error|CUDA driver initialization "
                r"failed)[^\n]{0,400}"
            ),
            r"cudaGetDeviceCount\(\)[^\n]{0,200}Error 80[0-9]",
            r"Failed to initialize NVML: (?!Insufficient)",
        ),
        ("UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
    ),
    (
        "host-oom",
        _K.OUT_OF_MEMORY,
        "root",
        (
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
            r"\bOOMKilled\b",
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
        "pcie-fatal",
        _K.GPU_DRIVER_ERROR,
        "root",
        (
            r"PCIe Bus Error: severity=Uncorrect(?:ed|able) \((?:Fatal|Non-Fatal)\)",
            r"AER: Uncorrect(?:ed|able) \(Fatal\) error",
        ),
        "nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    ),
    (
        "gpu-missing",
        _K.GPU_LOST,
        "root",
        (r"[Ee]xpected \d{1,2} GPUs?,? (?:but )?(?:found|got|detected|only|saw) ",),
        "prolog: expected 8 GPUs, found 7",
    ),
    (
        "nvlink-inactive",
        _K.NVLINK_ERROR,
        "root",
        (r"\bLink \d{1,2}: <?inactive>?",),
        "  Link 4: <inactive>",
    ),
    (
        "slot-empty",
        _K.GPU_LOST,
        "root",
        (
            r"pciehp: Slot\([^)]{1,16}\): (?:Link Down|Card not present)",
            r"No devices were found",
        ),
        "pcieport 0000:40:01.1: pciehp: Slot(12): Card not present",
    ),
    (
        "node-gone",
        _K.NODE_LOST,
        "root",
        (
            r"\bNODE_FAIL\b",
            r"DUE TO NODE FAILURE",
            r"[Nn]ode failure on \S{1,64}",
            r"NodeNotReady",
            r"node (?:is )?not ready",
            r"[Nn]ode \S{1,64} (?:is )?(?:not responding|unreachable|lost)\b",
            r"failed to send a keep-alive heartbeat to the rendezvous",
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
)
