"""From a rank's last words to a kind of failure: an ordered table, the first row that matches wins.

Two things decide: the type of the exception and the shape of its text. What a user's code raises (`ValueError("NVLink ...")`)
is never hardware: only the types in which PyTorch, NCCL and the driver speak can name hardware, and only in their own
phrases. `CUDA error: device-side assert triggered` is most often an index out of range in the user's batch, but nothing in
it tells: it is CUDA_ERROR, is tried again, and a job that makes no progress is stopped by the restart budget.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from unicron_lib.detection.phrases import LOSS_IS_NAN, PHRASES, USER_PHRASES
from unicron_lib.domain.failures import ECHOES, ErrorKind

TEXT_LIMIT = 8 << 10
"""Characters of a message that are looked at: half from the head, half from the tail."""

RUNTIME_TYPES = frozenset(
    {
        *("RuntimeError", "AcceleratorError", "OutOfMemoryError", "SystemError", "InternalTorchDynamoError", "InductorError"),
        *("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "CUDARuntimeError", "CudaError"),
        *("NVMLError", "NCCLError", "OSError", "IOError", "TimeoutError", "ConnectionError", "gaierror", "timeout", "error"),
        *("ProcessExitedException", "ProcessRaisedException", "ChildFailedError", "CalledProcessError", "CollectiveFailed"),
    }
)
"""Types whose texts come from PyTorch, NCCL, the driver or the kernel."""

USER_TYPES = frozenset(
    {
        *("UserError", "ImportError", "ModuleNotFoundError", "NameError", "UnboundLocalError", "SyntaxError"),
        *(
            "IndentationError",
            "AttributeError",
            "TypeError",
            "KeyError",
            "IndexError",
            "LookupError",
            "ValueError",
            "AssertionError",
        ),
        *("NotImplementedError", "RecursionError", "ArithmeticError", "ZeroDivisionError", "OverflowError", "StopIteration"),
        *("UnicodeError", "UnicodeDecodeError", "UnicodeEncodeError", "JSONDecodeError", "ValidationError"),
        *("FileNotFoundError", "FileExistsError", "IsADirectoryError", "NotADirectoryError", "PermissionError"),
        *("HFValidationError", "RepositoryNotFoundError", "GatedRepoError", "ConfigAttributeError", "ConfigKeyError"),
        *("MissingMandatoryValue", "ScannerError", "ParserError", "TemplateError", "UndefinedError", "Unsupported"),
    }
)
"""Types that tell of a mistake in the user's code, configuration or data: nothing that a restart would cure."""

_KINDS_OF_TYPES: dict[ErrorKind, tuple[str, ...]] = {
    ErrorKind.STORAGE_ERROR: (
        *("StoreError", "ObjectNotFound", "CheckpointError", "CheckpointException", "SafetensorError"),
        *("ClientError", "BotoCoreError", "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "NoSuchKey"),
        *("ConnectionClosedError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
        *("S3UploadFailedError", "ResponseStreamingError", "IncompleteReadError", "HTTPClientError", "ProxyConnectionError"),
    ),
    ErrorKind.DATALOADER_ERROR: ("DataError", "DataLoaderError"),
    ErrorKind.OUT_OF_MEMORY: ("MemoryError", "bad_alloc"),
    ErrorKind.LOSS_ANOMALY: ("FloatingPointError",),
    ErrorKind.CUDA_ERROR: ("WrongResult", "ResultsDiffer"),
    ErrorKind.NCCL_REMOTE_ERROR: ("PeerComputesWrongly",),
    ErrorKind.CONNECTION_REFUSED: ("ConnectionRefusedError",),
    ErrorKind.CONNECTION_RESET: ("ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError"),
}
_KIND_OF_TYPE = {name: kind for kind, names in _KINDS_OF_TYPES.items() for name in names}
_KIND_OF_TYPE |= dict.fromkeys(USER_TYPES, ErrorKind.USER_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row: applies to exceptions of `types` (None: any) whose text has the phrase."""

    kind: ErrorKind
    phrase: re.Pattern[str]
    types: frozenset[str] | None


def _rules() -> Iterable[Rule]:
    yield Rule(kind=ErrorKind.LOSS_ANOMALY, phrase=LOSS_IS_NAN, types=None)
    for kind, phrase in PHRASES:
        yield Rule(kind=kind, phrase=phrase, types=RUNTIME_TYPES)
    yield Rule(kind=ErrorKind.USER_ERROR, phrase=USER_PHRASES, types=frozenset({"RuntimeError", "OSError", "EnvironmentError"}))


RULES = tuple(_rules())


def kind_of_exception(error_type: str, message: str, *, cause: str = "", context: str = "") -> ErrorKind:
    """The kind of an exception by its type's name, its message and what it came from; OTHER if no rule knows it.

    `cause` is what it was raised from, `context` what was being handled when it was raised, both as "Type: message". The
    earliest names the root, except that a user's mistake explains only what nobody else explains, and what was merely
    being handled may have been no mistake at all.
    """
    own = _kind(error_type, message)
    for earlier, may_be_users in ((cause, True), (context, False)):
        kind = kind_of_text(earlier)
        if kind is ErrorKind.OTHER or kind in ECHOES:
            continue
        if kind is not ErrorKind.USER_ERROR or (may_be_users and own is ErrorKind.OTHER):
            return kind
    return own


def kind_of_text(text: str) -> ErrorKind:
    """The same for the last line of a traceback, "Type: message", and what may follow it."""
    error_type, _, message = text.partition(":")
    return _kind(error_type, message)


def _kind(error_type: str, message: str) -> ErrorKind:
    name, message = error_type.strip().rpartition(".")[2], message.strip()
    if len(message) > TEXT_LIMIT:
        message = f"{message[: TEXT_LIMIT // 2]}\n{message[-TEXT_LIMIT // 2 :]}"
    known = _KIND_OF_TYPE.get(name)
    if known is not None and not (known is ErrorKind.USER_ERROR and LOSS_IS_NAN.search(message)):
        return known
    types = {name} | ({"RuntimeError"} if name.startswith(("NVMLError", "nccl")) else set())
    found = (rule.kind for rule in RULES if (rule.types is None or types & rule.types) and rule.phrase.search(message))
    return next(found, ErrorKind.OTHER)
