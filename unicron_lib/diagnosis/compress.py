"""Logs of any size as a page that a person can read."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from unicron_lib.diagnosis.merge import interesting
from unicron_lib.diagnosis.templates import Kind, Kinds

MAX_LINES = 200
_WIDTH = 240
_SHOWN_WRITERS = 6
_FIXED = 4
"""Lines of the page that are no kind of line."""


def compress(paths: Sequence[Path], max_lines: int = MAX_LINES) -> str:
    """What these logs say, each kind of line once, in at most `max_lines` lines.

    In the order of time: where such a line stands first, how many there are, who wrote them, where the last is, the first
    as it stands. If there are too many kinds, those with words of failures stay, then the rarest. Raises OSError for a
    log that cannot be read.
    """
    kinds = Kinds()
    deque(interesting(paths, kinds=kinds), maxlen=0)
    return "\n".join(_page(kinds, len(paths), max(max_lines, _FIXED + 1)))


def _page(kinds: Kinds, num_logs: int, max_lines: int) -> Iterator[str]:
    yield f"{num_logs} logs, {kinds.num_bytes / 1e6:.1f} MB, {kinds.num_lines} lines"
    noises = kinds.noises
    if noises:
        yield "left out: " + ", ".join(f"{it.count} of {it.noise}" for it in noises)
    yield from (f"{it.noise}: {_span(it)}" for it in noises if it.noise == "iterations")
    told = kinds.told
    shown = sorted(told, key=lambda it: (not it.telling, it.count))[: max_lines - _FIXED]
    for it in sorted(shown, key=_when):
        yield _row(it)
    if hidden := len(told) - len(shown):
        chosen = {id(it) for it in shown}
        yield f"and {sum(it.count for it in told if id(it) not in chosen)} lines of {hidden} more kinds"


def _when(kind: Kind) -> tuple[float, str, int]:
    first = kind.first
    return (first.at or 0.0, first.file, first.number) if first else (float("inf"), "", 0)


def _row(kind: Kind) -> str:
    if not (first := kind.first):
        return ""
    if not kind.template:
        return f"{kind.count} lines of more kinds than are told apart, such as {Path(first.file).name}:{first.number}"
    again = f" x{kind.count}, last {Path(kind.last[0]).name}:{kind.last[1]}" if kind.count > 1 else ""
    writers = f" ({_writers(kind)})" if len(kind.writers) > 1 else ""
    return f"{_clock(first.at)}{Path(first.file).name}:{first.number}{again}{writers}  {_short(first.text)}"


def _span(kind: Kind) -> str:
    if not (first := kind.first):
        return ""
    last_file, last_number = kind.last
    span = f"first {Path(first.file).name}:{first.number}, last {Path(last_file).name}:{last_number}"
    return f"{span}: {_short(first.text.lstrip())}"


def _clock(at: float | None) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M:%S} " if at is not None else ""


def _writers(kind: Kind) -> str:
    names = sorted((Path(it).name for it in kind.writers), key=_by_number)
    more = f" and {len(names) - _SHOWN_WRITERS} more" if len(names) > _SHOWN_WRITERS else ""
    return " ".join(names[:_SHOWN_WRITERS]) + more


def _by_number(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d+", name)], name


def _short(text: str) -> str:
    text = text.rstrip()
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 6]} [...]"
