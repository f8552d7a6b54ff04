"""Who said a line: what launchers, containers and log collectors put before a process's own words. Pure.

Some are known. The others are learnt from the log itself: what stands before a traceback's first line, or before one of its
frames, stands before the other lines of that process too.
"""

import re

LOOK_AT = 2000
"""Characters of a line that are looked at; a longer one is cut."""
TRACEBACK = "Traceback (most recent call last):"
MAX_SHAPES = 32
"""Prefixes of one log that are told apart by more than numbers."""
_LONGEST = 200

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]|\x1b[()][A-Z0-9]")
_WHO = re.compile(
    r"\[?(?:default|rank|Rank )\d{1,6}\]?:[ ]?|\d{1,5}: |\[\d{1,5}(?:,[^\]\n]{1,80})?\](?:<std(?:out|err|diag)>)?:[ ]?|"
    r"\((?:[\w.-]{1,64} )?(?:pid|ip)=[^)\n]{1,100}\)[ ]?|\[?pod/[^\]\s]{1,200}\]?[ ]|(?=\w{0,60}[-\d])[\w.-]{1,64} {0,16}\| "
)
"""torchrun and PyTorch, srun -l, mpirun and Horovod, Ray, kubectl, docker compose."""
_WHEN = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,12}(?:Z|[+-]\d\d:?\d\d)? "
    r"(?:std(?:out|err) [FP] |\| [A-Z]{4,8} {1,4}\| [\w.<>-]{1,128}:[\w.<>]{1,64}:\d{1,6} - )?"
)
"""Times alone, as containerd's logs and loguru have them."""

_FIELDS = re.compile(
    r'"(?:log|message|msg|text|textPayload|event|exc_info|exception|stack_trace|stacktrace|traceback)" ?: ?'
    r'"((?:[^"\\]|\\.){1,2000})'
)
"""Where lines in JSON have the words: Docker, loggers for machines, the clouds' collectors."""
_ESCAPED = {"n": "\n", "t": "\t", "r": "", "u001b": "\x1b"}
_ESCAPE = re.compile(r"\\(u001b|.)")

_FRAME = re.compile(r'(?P<before>[^\n]{1,200}?)  File "[^"\n]{1,400}", line \d{1,7}, in ')
_NUMBERS = re.compile(r"\d+")
_TIMES = re.compile(r"\d{1,4}(?:[-:/.,T ]\d{1,9}){2,8}Z?")


def parted(text: str) -> tuple[str, str]:
    """Who said a line, as launchers label a rank's words, and the line without colours, times and that; still indented."""
    text = _ANSI.sub("", text[:LOOK_AT].rstrip("\r\n")) if "\x1b" in text else text[:LOOK_AT].rstrip("\r\n")
    if "\r" in text:
        text = text.rpartition("\r")[2]
    who = ""
    while label := _WHO.match(text) or _WHEN.match(text):
        who += label[0] if label.re is _WHO else ""
        text = text[label.end() :]
    return who, text


def spoken(text: str) -> list[str]:
    """The lines that a line without its labels stands for: more than one where JSON or escapes hold a whole traceback."""
    if text[:1] == "{" and (fields := _FIELDS.findall(text)):
        return [line for field in fields for line in _unescaped(field).rstrip("\n").split("\n")]
    if TRACEBACK + "\\n" in text:
        return _unescaped(text).rstrip("\n").split("\n")
    return [text]


def _unescaped(text: str) -> str:
    return _ANSI.sub("", _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text))


class Prefixes:
    """What the lines of one log begin with, besides the labels that are known."""

    def __init__(self) -> None:
        self._shapes: dict[str, re.Pattern[str]] = {}

    def parted(self, text: str) -> tuple[str, str]:
        """Who said a line, without the time at which, and what; to be asked about all lines of the log in their order."""
        if (before := _before_traceback(text)) and len(self._shapes) < MAX_SHAPES:
            shape = _shape(before)
            self._shapes.setdefault(shape, re.compile(shape))
        for pattern in self._shapes.values():
            if found := pattern.match(text):
                return _TIMES.sub("", found[0]), text[found.end() :]
        return "", text


def _before_traceback(text: str) -> str:
    """What stands before words with which a line of a traceback begins; nothing if it is a part of them."""
    before, found, _ = text.partition(TRACEBACK)
    if not found:
        frame = _FRAME.match(text)
        before = frame["before"] if frame else ""
    words = before.strip(" >")
    is_part = words.isalpha() and words.istitle()
    return before if words and not is_part and "Group" not in words and len(before) <= _LONGEST else ""


def has_frame(text: str) -> bool:
    """Whether a line is of a traceback and tells where in the code, whatever stands before."""
    return ", line " in text and _FRAME.match(text) is not None


def _shape(prefix: str) -> str:
    """A pattern for prefixes that differ from this one by no more than numbers."""
    return r"\d{1,20}".join(map(re.escape, _NUMBERS.split(prefix)))
