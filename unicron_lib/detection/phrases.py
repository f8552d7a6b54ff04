"""What PyTorch, NCCL, gloo, the driver and the kernel say in their errors, in the order in which one phrase outdoes another.

A phrase that names hardware is anchored in the words of who says it, because a text can quote anything.
"""

import re

from unicron_lib.domain.failures import ErrorKind

_CUDA = (
    r"(?:CUDA error(?: \d+)?: |CUDA driver error: |Cuda failure (?:\d+ )?'?|"
    r"CUDA (?:runtime )?API error[^\n]{0,40}: |NVML\w*[^\n]{0,40}: |Triton Error \[CUDA\]: |"
    r"Unexpected error from cuda\w+\(\)[^\n]{0,160}\bError \d+: )"
)
"""Who speaks before the driver's own words."""


def _cuda(*words: str) -> str:
    return rf"{_CUDA}[^\n]{{0,80}}?(?:{'|'.join(words)})"


def _errno(*numbers: int) -> str:
    return rf"\[Errno (?:{'|'.join(map(str, numbers))})\]"


_TABLE: tuple[tuple[ErrorKind, tuple[str, ...]], ...] = (
    (ErrorKind.ECC_ERROR, (_cuda(r"uncorrectable ECC", r"double.bit ECC", r"ECC error"),)),
    (ErrorKind.NVLINK_ERROR, (_cuda(r"[^\n]{0,40}nvlink", r"[^\n]{0,40}NVLink", r"[^\n]{0,40}Nvlink", r"fabric"),)),
    (ErrorKind.INVALID_DMA_MAPPING, (_cuda(r"[^\n]{0,40}DMA", r"mapping of buffer object failed"), r"invalid DMA mapping")),
    (
        ErrorKind.GPU_LOST,
        (
            _cuda(r"GPU is lost", r"fallen off the bus", r"no CUDA-capable device"),
            r"\A(?:No CUDA GPUs are available|GPU is lost)",
        ),
    ),
    (
        ErrorKind.GPU_DRIVER_ERROR,
        (
            _cuda(r"driver shutting down", r"initialization error", r"system not yet initialized", r"unknown error"),
            _cuda(r"system has unsupported display driver", r"driver version is insufficient"),
            r"CUDA driver (?:version is insufficient|initialization failed)",
            r"CUDA unknown error - this may be due to",
            r"Driver/library version mismatch|Found no NVIDIA driver on your system|driver on your system is too old",
        ),
    ),
    (
        ErrorKind.ILLEGAL_MEMORY_ACCESS,
        (_cuda(r"illegal memory access", r"misaligned address", r"invalid address space"),),
    ),
    (
        ErrorKind.OUT_OF_MEMORY,
        (
            r"CUDA out of memory\.|HIP out of memory\.",
            _cuda(r"out of memory"),
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
            r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|std::bad_alloc",
            _errno(12),
            r"unable to (?:mmap|allocate)[^\n]{0,200}(?:Cannot allocate memory|shared memory)",
        ),
    ),
    (
        ErrorKind.DATALOADER_ERROR,
        (
            r"DataLoader worker \(pid\(?s?\)?[^)\n]{0,200}\)|DataLoader timed out after|Pin memory thread exited",
            r"Too many open files\. Communication with the workers|received \d{1,4} items of ancdata",
            r"unable to (?:write to|open) (?:file|shared memory object) </?torch_",
        ),
    ),
    (
        ErrorKind.LINK_FLAPPING,
        (r"NET/IB\b[^\n]{0,120}(?:port (?:error|down)|link (?:down|flap))", r"NIC \S+ (?:is down|link down)|link flap"),
    ),
    (ErrorKind.NCCL_REMOTE_ERROR, (r"ncclRemoteError|remote process exited or there was a network error",)),
    (
        ErrorKind.NCCL_TIMEOUT,
        (
            r"Watchdog caught collective operation timeout",
            r"(?:NCCL|Gloo|gloo)\b[^\n]{0,160}(?:timed out|timeout)",
            r"Timed out waiting \d+ ?ms",
            r"failed to pass monitoredBarrier|received errors while waiting for send/recv from rank",
            r"\Await timeout after \d+ms",
        ),
    ),
    (ErrorKind.CONNECTION_REFUSED, (r"[Cc]onnection refused|ECONNREFUSED",)),
    (
        ErrorKind.CONNECTION_RESET,
        (r"[Cc]onnection (?:was )?(?:reset|closed|aborted)|Broken pipe|ECONNRESET|EPIPE|recvValue failed",),
    ),
    (
        ErrorKind.STORAGE_ERROR,
        (
            rf"{_errno(5, 28, 30, 103, 116, 121, 122)}|Stale file handle|No space left on device|Disk quota exceeded",
            r"PytorchStream(?:Reader|Writer) failed|Error while deserializing header",
            r"unexpected pos \d+ vs \d+|failed finding central directory",
        ),
    ),
    (
        ErrorKind.NETWORK_ERROR,
        (
            r"NCCL (?:error|Error)|nccl(?:System|Internal|Unhandled)\w*Error",
            r"\[[^\]\n]{0,200}gloo/|[Gg]loo connectFullMesh failed|ProcessGroup(?:NCCL|Gloo)",
            r"No route to host|[Nn]etwork is (?:unreachable|down)|Name or service not known",
            r"Temporary failure in name resolution",
            r"(?:client|server) socket has (?:timed out|failed)|Connection timed out|Socket Timeout|EADDRINUSE",
        ),
    ),
    (
        ErrorKind.CUDA_ERROR,
        (
            _CUDA,
            r"\bCU(?:BLAS|DNN|SPARSE|SOLVER|FFT)_STATUS_\w+|cuDNN error|\bcudaError\w*",
            r"device\(s\) is/are busy or unavailable",
        ),
    ),
)
PHRASES = tuple((kind, re.compile("|".join(patterns))) for kind, patterns in _TABLE)

LOSS_IS_NAN = re.compile(
    r"found (?:NaN|Inf|nan|inf) in local (?:grad norm|forward loss)|Unexpected result (?:nan|inf)\b|"
    r"\b[Ll]oss (?:is|became|was|=|==) ?(?:nan|NaN|inf|Inf)\b|(?:nan|NaN|inf|Inf) (?:in the |in )?loss\b"
)
"""The loss or a gradient is not a number, whoever says so: Megatron asserts it."""

USER_PHRASES = re.compile(
    r"shapes? cannot be multiplied|must match the (?:size|existing size) of tensor|Sizes of tensors must match|"
    r"shape '[^'\n]{0,200}' is invalid for input|Error\(s\) in loading state_dict|[Ss]ize mismatch for |"
    r"Expected all tensors to be on the same device|expected (?:scalar type|m1 and m2|input)|"
    r"(?:Input|Expected) type .{0,200}(?:should be the same|to be)|does not require grad|"
    r"modified by an inplace operation|Trying to backward through the graph a second time|"
    r"Expected to have finished reduction in the prior iteration|is a view and is being modified inplace|"
    r"Can't load (?:tokenizer|the configuration|the model)|is not a valid model identifier|"
    r"The size of tensor a|The expanded size of the tensor|Given groups=|not implemented for '\w+'|"
    r"Boolean value of Tensor|environment variable \w+ expected"
)
"""What PyTorch says about mistakes in the user's model or configuration."""
