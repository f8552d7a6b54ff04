"""From a rank's last words to a kind of failure: an ordered table, the first row that matches wins."""

import re

from unicron_lib.domain.failures import ErrorKind

_USER_MISTAKES = (
    *("UserError", "ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "IndentationError", "AttributeError"),
    *("TypeError", "KeyError", "IndexError", "ValueError", "AssertionError", "NotImplementedError", "FileNotFoundError"),
)
_RULES: tuple[tuple[str, ErrorKind], ...] = (
    (r"uncorrect(able|ed) ECC|double.?bit ECC|ECC error", ErrorKind.ECC_ERROR),
    (r"DMA mapping|invalid DMA", ErrorKind.INVALID_DMA_MAPPING),
    (r"NVLink|NVSwitch", ErrorKind.NVLINK_ERROR),
    (r"fallen off the bus|GPU is lost|device.*unavailable", ErrorKind.GPU_LOST),
    (r"driver (version|error|shutting down)|NVRM|initialization error.*driver", ErrorKind.GPU_DRIVER_ERROR),
    (r"illegal memory access|misaligned address|illegal instruction", ErrorKind.ILLEGAL_MEMORY_ACCESS),
    (r"out of memory|OutOfMemory|MemoryError|can't allocate memory|Cannot allocate memory", ErrorKind.OUT_OF_MEMORY),
    (
        r"(NCCL|Gloo|ProcessGroup).*(timeout|timed out)|Timed out waiting \d+ms|Watchdog caught collective",
        ErrorKind.NCCL_TIMEOUT,
    ),
    (r"ncclRemoteError|remote process exited|NCCL.*remote", ErrorKind.NCCL_REMOTE_ERROR),
    (r"[Cc]onnection refused|ECONNREFUSED", ErrorKind.CONNECTION_REFUSED),
    (r"[Cc]onnection (reset|closed)|Broken pipe|ECONNRESET|EPIPE", ErrorKind.CONNECTION_RESET),
    (r"link.*(flap|down)|port.*down", ErrorKind.LINK_FLAPPING),
    (r"NCCL|gloo|DistNetworkError|DistStoreError|No route to host|[Nn]etwork|socket", ErrorKind.NETWORK_ERROR),
    (r"CUDA error|cuda(Error|Runtime)|CUBLAS|cuDNN", ErrorKind.CUDA_ERROR),
    (r"StoreError|CheckpointError|SlowDown|ExpiredToken|No space left|S3|ClientError", ErrorKind.STORAGE_ERROR),
    (r"DataLoader|dataloader|DataError", ErrorKind.DATALOADER_ERROR),
    (r"\b(nan|NaN|inf)\b.*loss|loss.*\b(nan|NaN|inf)\b", ErrorKind.LOSS_ANOMALY),
    (rf"^({'|'.join(_USER_MISTAKES)})\b", ErrorKind.USER_ERROR),
)
_COMPILED = tuple((re.compile(pattern, re.DOTALL), kind) for pattern, kind in _RULES)


def kind_of_exception(error_type: str, message: str) -> ErrorKind:
    """The kind of an exception by its type's name and its message; OTHER if no rule knows it."""
    text = f"{error_type}: {message}"
    return next((kind for pattern, kind in _COMPILED if pattern.search(text)), ErrorKind.OTHER)
