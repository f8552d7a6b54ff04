"""When a line was written, and by which rank: what the line itself or its file's name tells."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import PurePath

_HEAD = 200
"""Characters of a line that may hold its time or rank."""
_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: number for number, name in enumerate(_NAMES, start=1)}
_MONTH = "|".join(_NAMES)
_CLOCK = r"(?P<hour>[01]\d|2[0-3]):(?P<minute>[0-5]\d):(?P<second>[0-5]\d)(?:[.,](?P<fraction>\d{1,9}))?"
_FORMATS = tuple(
    re.compile(before + _CLOCK + after)
    for before, after in (
        (r"(?<!\d)(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T ]", r" ?(?P<zone>Z|[+-]\d\d:?\d\d)?"),
        (rf"\b(?P<month>{_MONTH}) {{1,2}}(?P<day>\d{{1,2}}) ", r"(?: (?P<year>\d{4}))?\b"),
        (r"(?<![^\s\[:])[IWEFDVC](?P<year>\d{4})?(?P<month>\d{1,2})(?P<day>\d\d) ", r"\b"),
    )
)
"""ISO 8601 as logging, NCCL, Megatron and DeepSpeed write it; syslog and dmesg -T; glog, where PyTorch writes May as 5."""

_RANK_IN_LINE = re.compile(r"\[(?:rank|Rank|RANK)[ :]?(?P<rank>\d{1,6})\]")
_RANK_IN_NAME = re.compile(r"(?:^|[._-])(?:r|rank)[._-]?(?P<rank>\d{1,6})(?=[._-]|$)", re.IGNORECASE)


def time_of(text: str, reference: float) -> float | None:
    """When the line was written, in epoch seconds; None if it does not tell.

    A time without a zone is taken as UTC. One without a year is the one nearest to `reference`, epoch seconds.
    """
    if ":" not in text[:_HEAD]:
        return None
    for pattern in _FORMATS:
        if found := pattern.search(text, 0, _HEAD):
            return _seconds(found, reference)
    return None


def full_time_of(text: str) -> float | None:
    """The same, but of times that tell their year only."""
    for pattern in _FORMATS:
        found = pattern.search(text, 0, _HEAD)
        if found and found["year"]:
            return _seconds(found, 0.0)
    return None


def reference_time(heads: Iterable[str], written_at: float) -> float:
    """What times without a year are near to: the first time with one in any log's head, else when the logs were written."""
    times = (full_time_of(line) for head in heads for line in head.splitlines())
    return next((at for at in times if at is not None), written_at)


def rank_of_line(text: str) -> int | None:
    """The rank that the line says it is of: `[rank5]:`, `[Rank 5]`."""
    found = _RANK_IN_LINE.search(text, 0, _HEAD)
    return int(found["rank"]) if found else None


def rank_of_file(name: str) -> int | None:
    """The rank whose log has this name: `g3-r5.log`, `job.rank5.log`, `rank_5.err`."""
    found = _RANK_IN_NAME.findall(PurePath(name).name)
    return int(found[-1]) if found else None


def _seconds(found: re.Match[str], reference: float) -> float | None:
    parts = found.groupdict()
    year = parts["year"]
    years = [int(year)] if year else _years_near(reference)
    times = [at for at in (_in_year(parts, each) for each in years) if at is not None]
    return min(times, key=lambda at: abs(at - reference), default=None)


def _years_near(reference: float) -> list[int]:
    year = datetime.fromtimestamp(reference, UTC).year
    return [year - 1, year, year + 1]


def _in_year(parts: dict[str, str | None], year: int) -> float | None:
    month = parts["month"] or ""
    try:
        day = datetime(year, _MONTHS.get(month) or int(month), int(parts["day"] or 0), tzinfo=_zone(parts.get("zone")))
        clock = timedelta(**{f"{unit}s": int(parts[unit] or 0) for unit in ("hour", "minute", "second")})
    except ValueError:
        return None
    return (day + clock).timestamp() + float(f"0.{parts['fraction'] or 0}")


def _zone(text: str | None) -> timezone:
    if not text or text == "Z":
        return UTC
    digits = text[1:].replace(":", "")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-offset if text[0] == "-" else offset)
