"""Python's tracebacks in a log: which exception was the cause, in whose code it was raised. One reader a process."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unicron_lib.detection.exceptions import kind_of_exception, kind_of_text
from unicron_lib.diagnosis.prefixes import TRACEBACK, has_frame
from unicron_lib.domain.failures import ECHOES, ErrorKind

_START = TRACEBACK
_BOX = re.compile(r"[─━+-]{2,200} Traceback \(most recent call last\) [─━+-]{2,200}")
_IN_BOX = ("│", "┃", "╭", "╰", "┏", "┗", "|", "+--")
"""How rich draws a traceback: the exception stands below the box."""
_FRAME = re.compile(
    r"^(?:[\s>]{1,8}File \"(?P<file>[^\"]{1,400})\", line (?P<line>\d{1,7})|"
    r"[│┃|] (?P<boxed>[^\s:]{1,400}):(?P<boxed_line>\d{1,7}) in )"
)
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
        ErrorKind.LOSS_ANOMALY,
        re.compile(
            r"\w{1,60}: .{0,200}(?:[Ll]oss\b.{0,60}(?<![\w.])(?:is|was|became|=|:) {0,3}(?:tensor\()?"
            r"(?i:nan|inf|non-finite|not finite)\b|"
            r"(?:[Nn]orm|[Gg]radients?)\b.{0,100}(?:is|are) (?:non-finite|not finite|NaN|nan)\b|"
            r"(?:NaN|nan)s? .{0,20}(?:in|for) .{0,20}(?:loss|grad)|"
            r"[Dd]etected (?:nan|NaN)|loss scale already at minimum)"
        ),
    ),
    (
        ErrorKind.STORAGE_ERROR,
        re.compile(
            r"(?:PermissionError|FileNotFoundError|OSError|IOError|ClientError): .{0,300}"
            r"(?:token (?:has expired|provided|included)|"
            r"reduce your request rate|[Ss]tale file handle|[Ii]nput/output error|couldn't connect to|"
            r"connection error when trying to load|transport endpoint shutdown|Host is down)|"
            r"PermissionError: (?:Access Denied|Forbidden)\b|"
            r"\w{1,40}: .{0,40}\b(?:5\d\d Server Error|429 Client Error)"
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
            r"\w{0,60}(?:(?:Config|Misconfig)\w{0,12}|Composition|Instantiation|Argument\w{0,8}|Usage|Override\w{0,8})(?:Exception|Error):"
        ),
    ),
)
"""What libraries around PyTorch raise, as "Type: text"; it decides where the types that are told there know no better."""

MAX_LINES = 400
"""A traceback that goes on for longer is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that a log shows. `users` tells whether the innermost frame is in code of no library.

    `module` is that of the type, if it is told. `where` is that frame, "file:line". `heard` is false for what Python ignored,
    such as in destructors.
    """

    kind: ErrorKind
    type: str
    text: str
    module: str = ""
    where: str = ""
    users: bool = False
    heard: bool = True
    in_thread: bool = False


def is_of_traceback(text: str) -> bool:
    """Whether a line, without its labels, begins or ends a traceback or tells how two hang together."""
    words = (_START, _CAUSED, _HANDLED)
    patterns = (_NAMED, _UNHEARD, _THREAD, _FRAME)
    return (
        any(it in text for it in words) or any(it.match(text) for it in patterns) or bool(_BOX.search(text)) or has_frame(text)
    )


class TracebackReader:
    """Follows the lines of one process."""

    def __init__(self) -> None:
        self._open = 0
        self._frame = ""
        self._before = ("", "")
        self._link = ""
        self._ignored = self._thread = False
        self.is_cut = False
        """Whether the last line ended a traceback though it tells of no exception."""

    def read(self, text: str) -> Raised | None:
        """Take in the next line, without its labels; the exception that it ends a traceback with, or names by itself."""
        self.is_cut = False
        if text.rstrip().endswith(_START) or _BOX.search(text):
            self._begin(text)
            return None
        if self._open:
            return self._inside(text)
        return self._outside(text)

    @property
    def is_inside(self) -> bool:
        """Whether the next line may belong to a traceback."""
        return self._open > 0

    @property
    def is_heard(self) -> bool:
        """Whether the traceback is not one that Python ignores."""
        return not self._ignored

    def quotes(self, text: str) -> bool:
        """Whether the line belongs to a traceback, and quotes code."""
        return self._open > 0 and (text[:1].isspace() or text.startswith(_IN_BOX))

    def _begin(self, text: str) -> None:
        self._open, self._frame = 1, ""
        if text.startswith("Original Traceback"):
            self._link = ""

    def _inside(self, text: str) -> Raised | None:
        self._open += 1
        if _OTHERS.match(text):
            return None
        if frame := _FRAME.match(text):
            self._frame = f"{frame['file'] or frame['boxed']}:{frame['line'] or frame['boxed_line']}"
            return None
        last = _LAST.match(text)
        if not text.strip() or self.quotes(text) or not last:
            self.is_cut = bool(text.strip()) and not self.quotes(text)
            self._open = 0 if self._open > MAX_LINES or self.is_cut else self._open
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
            module=name.rpartition(".")[0],
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
    own = next((other for other, pattern in _ALSO if pattern.match(told)), kind)
    return _echo_of(chain) if own is ErrorKind.OTHER else own


def _echo_of(chain: Mapping[str, str]) -> ErrorKind:
    """What a peer's end is told as where an exception that nobody knows was raised from it, or while it was handled."""
    kinds = (kind_of_text(earlier) for earlier in chain.values())
    return next((kind for kind in kinds if kind in ECHOES), ErrorKind.OTHER)
