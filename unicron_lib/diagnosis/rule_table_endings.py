"""How a job's end is told: by who takes its nodes away, by launchers and containers, and advice, which tells of no end.

A row: name, kind, role, alternatives of its pattern, a line that it is found in.
"""

from unicron_lib.diagnosis.rule_table_hardware import Row
from unicron_lib.domain.failures import ErrorKind

_K = ErrorKind
NAMED = "named-exception"
"""The rule of errors that name an exception: if they are a log's last words, something is wrong."""

ROWS: tuple[Row, ...] = (
    (
        "notice-to-leave",
        _K.PREEMPTED,
        "root",
        (
            r"\bJob suspended\b",
            r"Spot ITN received|[Kk]ind\"?[=:] ?\"?SPOT_ITN",
            (
                r"[Ii]nstance (?:\S{1,40} )?will be (?:interrupted|terminated|stopped|reclaimed|preempted) (?:at|in|"
                r"by|within)\b"
            ),
            (
                r"[Ss]pot (?:\w{1,12} )?interrupt(?:ed|ion)\b(?! (?:notice )?(?:handler|watch|check|poll|drain|"
                r"monitor))[^\n]{0,60}(?:received|initiat|terminat|detected|imminent|will be)"
            ),
            r"Preempted to accommodate",
            r"EvictedDueToPreempt",
            r"[Pp]reempted (?:pod[ /]|JobI[dD]=)",
            r": job preempted\b",
            r"^\s?\S{0,24}\s{1,8}(?:Normal|Warning)\s{1,8}Preempted\b",
            r"InterruptedByPlatform",
            r"has been requeued to reclaim",
            r"DeletionByTaintManager|Marking for deletion Pod",
            r"[Nn]ode is (?:being )?(?:gracefully )?shut(?:ting)? ?down\b",
            r"walltime \d{1,9} exceeded",
            r"TERM_RUNLIMIT",
            r"exceeded (?:the |its |job )?(?:wall ?(?:time|clock)|time) limit",
            r"reclaim(?:ed|ing) (?:the |this )?(?:spot |preemptible )?(?:instance|node|VM|capacity)\b",
            r"DUE TO (?:PREEMPTION|TIME LIMIT|JOB REQUEUE)",
            r"\bPREEMPTED\b",
            r"[Ss]pot (?:[Ii]nstance )?(?:[Ii]nterruption|[Tt]ermination) (?:notice|warning|action)",
            r"\"?instance-action\"?[^\n]{0,40}(?:terminate|stop|hibernate)",
            r"EC2 Spot Instance [Ii]nterruption",
            r"compute\.instances\.preempted",
            r"[Pp]reempt(?:ed|ion) (?:notice|signal|by|event)",
            r"(?:was|been|is being|being) preempted",
            r"TerminationByKubelet",
            r"Preempted by ",
            r"[Tt]o be (?:preempted|reclaimed)",
            r"instance/preempted[^\n]{0,20}TRUE",
            r"DisruptionTarget",
            r"imminent node shutdown",
            r"TaintManagerEviction",
            r"BidEvictedEvent",
            r"TERM_PREEMPT",
            r"EventType\"?: ?\"?(?:Preempt|Terminate)\b",
            r"[Ss]pot (?:instance|node|VM|capacity)[^\n]{0,60}(?:reclaimed|interrupted|evicted)",
            r"TERMINATE_ON_HOST_MAINTENANCE",
            r"[Pp]reempting (?:pod|instance|job)",
            r"requeue(?:d)? (?:due to|because of) preemption",
        ),
        "slurmstepd: error: *** JOB 48213 ON gpu-17 CANCELLED AT 2024-05-02T03:11:09 DUE TO PREEMPTION ***",
    ),
    (
        "told-to-stop",
        _K.PREEMPTED,
        "root",
        (
            r"[Rr]equeu(?:e?ing|ed) (?:the |this )?job\b",
            r"[Ss]ignal handler called with signal (?:10|12|15)\b",
            r"SIGTERMException",
            (
                r"(?:[Rr]eceived|Got|got|[Cc]aught|[Hh]andling signal:?)(?: a| the)?(?: signal:?| death signal)? "
                r"?\(?(?:Signals\.)?(?:SIGTERM|SIGUSR[12]|15\b)"
            ),
            r"got signal: 15",
            r"exiting program after receiving SIGTERM",
            r"SIGTERM (?:received|caught)",
            r"auto-requeue signal",
            r"[Rr]eceived (?:a )?termination signal",
            r"signal SIGTERM received",
        ),
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 3318 got signal: 15",
    ),
    (
        "job-cancelled",
        _K.PREEMPTED,
        "root",
        (r"\*\*\* JOB \S{1,64} ON \S{1,128} CANCELLED AT",),
        "slurmstepd: error: *** JOB 48213 ON gpu-17 CANCELLED AT 2024-05-02T03:11:09 ***",
    ),
    (
        "process-ended",
        _K.PROCESS_EXIT,
        "cascade",
        (
            r"ChildFailedError",
            r"exitcode\s{0,4}: {1,2}-?[1-9]",
            r"failed \(exitcode: -?\d{1,4}\)",
            r"Signal \d{1,2} \(SIG\w{2,8}\) received",
            r"[Ss]ending process \d{1,10} closing signal",
            (
                r"\*\*\* STEP [^\n*]{1,160} CANCELLED AT "
                r"(?![^\n]{0,60}DUE TO (?:PREEMPTION|TIME LIMIT|JOB REQUEUE|NODE FAILURE))"
            ),
            (
                r"\b(?:[Ee]xit(?:ed|s|ing)?|[Tt]erminated|died)(?: with)?(?: an?)?(?: non-zero)?(?: (?:exit|return|error))? ?"
                r"(?:code|status)[ =:]{1,4}\(?-?[1-9]\d{0,2}\b"
            ),
            r"\b(?:[Cc]ompleted|[Ff]ailed|[Ff]inished|returned) with (?:exit|return|error) (?:code|status)[ =:]{1,4}-?[1-9]",
            r"\b[Ee]xit ?[Cc]ode[\"']?[ =:]{1,4}-?[1-9]",
            r"non-zero (?:exit|return|status)",
            r"exited on signal \d",
            r"(?:[Tt]erminated|[Kk]illed|died) (?:by|with|due to) (?:signal|<Signals\.)",
            r"MPI_ABORT was invoked",
            r"CrashLoopBackOff|[Bb]ack-off restarting failed",
            r"[Ww]orker exit type: SYSTEM_ERROR",
            r"Job '?[\w.-]{1,80}'? (?:has )?failed\b",
            r"\(core dumped\)",
            r"(?:free|malloc|realloc)\(\): |double free or corruption|corrupted size vs|stack smashing detected",
            r"panicked at ",
            r"[Ss]egmentation fault",
            r"Caught signal 11",
            r"segfault at",
            r"srun: error: [^\n]{1,200}(?:Killed|Aborted|Exited|Terminated)",
            r"RendezvousClosedError",
            r"\bKilled\s*$",
            r"To avoid data inconsistency",
            r"terminate called (?:after|without|recursively)",
            r"Fatal Python error",
        ),
        "failed (exitcode: 1) local_rank: 3 (pid: 48231) of binary: /usr/bin/python3",
    ),
    (
        NAMED,
        _K.OTHER,
        "cascade",
        (
            (
                r"(?:\bERROR|\bError|\bFATAL|\bCRITICAL|\[error\]|\bE\d{4}|\[E)\b[^\n]{0,100}"
                r"[ '\"(.][A-Z]\w{1,40}(?:Error|Exception): "
            ),
        ),
        "[w3] ERROR - KeyError: 'labels'",
    ),
    (
        "advice",
        _K.OTHER,
        "advice",
        (
            r"CUDA_LAUNCH_BLOCKING",
            r"TORCH_USE_CUDA_DSA",
            r"TORCH_SHOW_CPP_STACKTRACES",
            r"kernel errors might be asynchronously reported",
            r"stacktrace below might be incorrect",
            r"For debugging consider",
            r"(?:try|consider) (?:setting|increasing|reducing|using) ",
            r"(?:may|might|could|can) (?:be caused|be due|indicate|happen)",
            r"[Ii]f you (?:suspect|see|encounter|get)",
            r"[Pp]ossible (?:cause|reason)s?",
            r"To enable tracing",
            r"https?://\S{1,200}troubleshooting",
            r"to avoid fragmentation",
            r"[Hh]int:",
            r"for details, see",
            r"(?:e\.g\.|for example),? ",
        ),
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    ),
)
