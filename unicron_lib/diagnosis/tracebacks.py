"""Python's tracebacks in a log: which exception was the cause, in whose code it was raised. One reader a process."""

import re
from dataclasses import dataclass

from unicron_lib.detection.exceptions import kind_of_exception
from unicron_lib.domain.failures import ErrorKind

_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s{1,8}File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,7})')
_LAST = re.compile(
    r"^\s{0,4}(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}(?:[A-Z]\w{0,80}|error|timeout|gaierror))(?::(?: (?P<text>.*)|\s*)|)$"
)
_OTHERS = re.compile(r"^[A-Z]{2,16}\b|^\[|^\S{1,64} kernel:")
"""How lines of others begin that got between those of a traceback: `NVRM: `, `WARNING:`, `[E ProcessGroupNCCL`."""
_NAMED = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exhausted|Expired|NotFound|bad_alloc))"
    r"(?:: (?P<text>.*)|:?\s*)$"
)
_CAUSED = "The above exception was the direct cause of the following exception"
_HANDLED = "During handling of the above exception, another exception occurred"
_UNHEARD = re.compile(r"^Exception ignored (?:in|on|while)\b|^Error in atexit|^--- Logging error ---")
_THREAD = re.compile(r"^Exception in thread ")
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python\d)|^<frozen|^/usr/(?:local/)?bin/")

_ALSO: tuple[tuple[ErrorKind, re.Pattern[str]], ...] = (
    (
        ErrorKind.STORAGE_ERROR,
        re.compile(
            r"(?:PermissionError|FileNotFoundError|OSError|IOError|ClientError): .{0,300}"
            r"(?:token (?:has expired|provided|included)|"
            r"reduce your request rate|[Ss]tale file handle|[Ii]nput/output error)"
        ),
    ),
    (ErrorKind.OUT_OF_MEMORY, re.compile(r"\w{0,40}(?:OutOfMemory|ArrayMemory)\w{0,10}:")),
    (
        ErrorKind.CONNECTION_REFUSED,
        re.compile(r"ClientConnector\w{0,16}: .{0,300}(?:Connect call failed|Cannot connect to host)"),
    ),
    (
        ErrorKind.CONNECTION_RESET,
        re.compile(r"(?:ServerDisconnected|RemoteDisconnected|ClientOSError|IncompleteRead)\w{0,16}:"),
    ),
    (
        ErrorKind.USER_ERROR,
        re.compile(
            r"\w{0,60}(?:Config\w{0,12}|Composition|Instantiation|Argument\w{0,8}|Usage|Override\w{0,8})(?:Exception|Error):"
        ),
    ),
)
"""What libraries around PyTorch raise, as "Type: text"; it decides where the types that are told there know no better."""

MAX_LINES = 400
"""A traceback that goes on for longer is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that a log shows. `users` tells whether the innermost frame is in code of no library.

    `where` is that frame, "file:line". `heard` is false for what Python ignored, such as in destructors.
    """

    kind: ErrorKind
    type: str
    text: str
    where: str = ""
    users: bool = False
    heard: bool = True
    in_thread: bool = False


def is_of_traceback(text: str) -> bool:
    """Whether a line, without its labels, begins or ends a traceback or tells how two hang together."""
    words = (_START, _CAUSED, _HANDLED)
    return any(it in text for it in words) or any(it.match(text) for it in (_NAMED, _UNHEARD, _THREAD))


class TracebackReader:
    """Follows the lines of one process."""

    def __init__(self) -> None:
        self._open = 0
        self._frame = ""
        self._before = ("", "")
        self._link = ""
        self._ignored = self._thread = False

    def read(self, text: str) -> Raised | None:
        """Take in the next line, without its labels; the exception that it ends a traceback with, or names by itself."""
        if text.rstrip().endswith(_START):
            self._begin(text)
            return None
        if self._open:
            return self._inside(text)
        return self._outside(text)

    @property
    def is_inside(self) -> bool:
        """Whether the next indented line belongs to a traceback: it quotes code."""
        return self._open > 0

    def _begin(self, text: str) -> None:
        self._open, self._frame = 1, ""
        if text.startswith("Original Traceback"):
            self._link = ""

    def _inside(self, text: str) -> Raised | None:
        self._open += 1
        if _OTHERS.match(text):
            return None
        if frame := _FRAME.match(text):
            self._frame = f"{frame['file']}:{frame['line']}"
            return None
        last = _LAST.match(text)
        if text[:1] in {" ", "\t", ""} or not last:
            self._open = 0 if self._open > MAX_LINES or (text.strip() and not text[0].isspace()) else self._open
            return None
        self._open = 0
        return self._raised(last["type"], (last["text"] or "").strip())

    def _outside(self, text: str) -> Raised | None:
        if _CAUSED in text:
            self._link = "cause"
        elif _HANDLED in text:
            self._link = "context"
        elif _UNHEARD.match(text):
            self._ignored = True
        elif _THREAD.match(text):
            self._thread = True
        elif named := _NAMED.match(text):
            self._frame = ""
            return self._raised(named["type"], (named["text"] or "").strip())
        return None

    def _raised(self, name: str, text: str) -> Raised:
        earlier = ": ".join(filter(None, self._before)) if self._link else ""
        chain = {self._link: earlier} if self._link else {}
        kind = _kind(name, text, **chain)
        users = bool(self._frame) and not _LIBRARY.search(self._frame)
        raised = Raised(
            kind=kind,
            type=name.rpartition(".")[2],
            text=text,
            where=self._frame,
            users=users,
            heard=not self._ignored,
            in_thread=self._thread,
        )
        root = self._before if self._link and kind is not _kind(name, text) else (name, text)
        self._before, self._link, self._ignored, self._thread = root, "", False, False
        return raised


def _kind(name: str, text: str, **chain: str) -> ErrorKind:
    kind = kind_of_exception(name, text, **chain)
    if kind not in {ErrorKind.OTHER, ErrorKind.USER_ERROR}:
        return kind
    told = f"{name.rpartition('.')[2]}: {text}"
    return next((other for other, pattern in _ALSO if pattern.match(told)), kind)
