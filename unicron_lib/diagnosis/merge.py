"""All logs of a job as one, in the order of time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from pathlib import Path

from unicron_lib.diagnosis.findings import Line
from unicron_lib.diagnosis.reading import BLOCK_BYTES, Block, read
from unicron_lib.diagnosis.sifting import Keys, Sifter
from unicron_lib.diagnosis.templates import Kinds
from unicron_lib.diagnosis.times import reference_time

AT_ONCE_BYTES = 16 << 20
MIN_BLOCK_BYTES = 16 << 10
"""What is read of all logs at once, and of each at least."""
_HEAD_BYTES = 16 << 10


def interesting(
    paths: Sequence[Path], is_wanted: Callable[[str], bool] | None = None, kinds: Kinds | None = None
) -> Iterator[Line]:
    """The lines of these logs that may tell why a job failed, and some that tell that it goes on, in the order of time.

    Lines of one log stay in its order, a line without a time belongs to the one before it, and logs without times come
    first. A line for which `is_wanted` is true is never taken for noise: it comes out unless a hundred lines did that differ
    from it by no more than numbers, and all its numbers of up to three digits among them. `kinds` counts all lines, those
    that are left out, too. Raises OSError for a log that cannot be read.
    """
    reference = reference_time((_head(path) for path in paths), max((path.stat().st_mtime for path in paths), default=0.0))
    block_bytes = max(MIN_BLOCK_BYTES, min(BLOCK_BYTES, AT_ONCE_BYTES // max(1, len(paths))))
    yield from merged(((str(path), read(path, block_bytes)) for path in paths), reference, is_wanted, kinds)


def merged(
    logs: Iterable[tuple[str, Iterable[Block]]],
    reference: float,
    is_wanted: Callable[[str], bool] | None = None,
    kinds: Kinds | None = None,
) -> Iterator[Line]:
    """The same of logs that are given as name and content. `reference`, epoch s, is what times without a year are near to."""
    keys = Keys(Kinds() if kinds is None else kinds, is_wanted or _nothing_more)
    streams = (Sifter(name, keys, reference).sift(content) for name, content in logs)
    for _, _, line in merge(*(_timed(stream, place) for place, stream in enumerate(streams)), key=lambda it: it[:2]):
        yield line


def _nothing_more(_text: str) -> bool:
    return False


def _timed(lines: Iterable[Line], place: int) -> Iterator[tuple[float, int, Line]]:
    """Lines with what they are ordered by: a clock that is set back does not tear a log apart."""
    latest = float("-inf")
    for line in lines:
        latest = max(latest, line.at if line.at is not None else latest)
        yield latest, place, line


def _head(path: Path) -> str:
    if not path.is_file() or path.suffix == ".gz":
        return ""
    with path.open("rb") as stream:
        return stream.read(_HEAD_BYTES).decode(errors="replace")
