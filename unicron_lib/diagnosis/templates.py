"""What lines have in common: their text without what differs from one to the next, and how often each such text occurred."""

import re
from dataclasses import dataclass, field

from unicron_lib.diagnosis.findings import Line

MAX_KINDS = 4000
"""Kinds of lines that are told apart; half as many again are kept for those with telling words. More are one kind."""
MAX_WRITERS = 4096
_LENGTH = 300
"""Characters by which lines are told apart."""

_MASKS = (
    ("time", r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"),
    ("id", r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"),
    ("path", r"(?<![\w/])(?:[a-z0-9]{2,8}:/)?(?:/[\w.@+=-]{1,128}){2,32}/?"),
    ("hex", r"\b0x[0-9a-fA-F]+|\b(?=[0-9a-f]{0,32}\d)[0-9a-f]{8,64}\b"),
    ("address", r"\b[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?\b|\b\d{1,3}(?:\.\d{1,3}){3}\b"),
    ("number", r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"),
)
_MASK = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _MASKS))
_MAY_CHANGE = re.compile(r"[\d/]")


def template_of(text: str) -> str:
    """The text with <time>, <id>, <path>, <hex>, <address> and <number> for what changes; its first 300 characters."""
    text = text[:_LENGTH].strip()
    return _MASK.sub(lambda found: f"<{found.lastgroup}>", text) if _MAY_CHANGE.search(text) else text


@dataclass(slots=True)
class Kind:
    """Lines with one template, or with one kind of noise. `first` is one of them as it stands.

    `telling`: some have a telling word. `writers` are the ranks, or files, that wrote such lines. Those of which there are
    too many to be told apart have no template.
    """

    template: str
    noise: str | None
    telling: bool = False
    first: Line | None = None
    last: tuple[str, int] = ("", 0)
    count: int = 0
    writers: set[str] = field(default_factory=set)

    def add(self, count: int, last: tuple[str, int], writer: str) -> None:
        """Count more of them, the last of which is line `last` (file, number)."""
        self.count += count
        self.last = last
        if len(self.writers) < MAX_WRITERS:
            self.writers.add(writer)


class Kinds:
    """All kinds of lines in some logs, and how many lines and bytes there were. Bounded: what is too much is one kind."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str | None, str], Kind] = {}
        self._rest = {telling: Kind(template="", noise=None, telling=telling) for telling in (False, True)}
        self.num_bytes = 0

    def of(self, text: str, *, noise: str | None, telling: bool) -> Kind:
        """The kind of a line, which may be new."""
        if not noise and len(self._kinds) >= MAX_KINDS * (3 if telling else 2) // 2:
            return self._rest[telling]
        template = "" if noise else template_of(text)
        found = self._kinds.get((noise, template))
        if found is None:
            found = self._kinds[noise, template] = Kind(template=template, noise=noise)
        found.telling |= telling and not noise
        return found

    @property
    def noises(self) -> list[Kind]:
        """What was left out, the most frequent first."""
        return sorted((it for it in self._kinds.values() if it.noise), key=lambda it: -it.count)

    @property
    def told(self) -> list[Kind]:
        """What is no noise, in the order found; those that were not told apart last."""
        return [it for it in (*self._kinds.values(), *self._rest.values()) if not it.noise and it.count]

    @property
    def num_lines(self) -> int:
        """Lines of all kinds."""
        return sum(it.count for it in (*self._kinds.values(), *self._rest.values()))
