"""Which reports of a failure are answers to an earlier one: a watchdog's abort, a peer's end, the launcher's signal. Pure."""

import re
from collections.abc import Iterable, Sequence

from unicron_lib.diagnosis.findings import Sighting
from unicron_lib.diagnosis.rules import ECHO, HINTS, STUCK
from unicron_lib.domain.failures import ErrorKind

_REMOTE = frozenset(
    {ErrorKind.NCCL_REMOTE_ERROR, ErrorKind.CONNECTION_RESET, ErrorKind.CONNECTION_REFUSED, ErrorKind.NETWORK_ERROR}
)
_STOPS = frozenset({"told-to-stop", "job-cancelled"})
_TIMED_OUT = "collective-timeout"
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d{1,12})|ran for (\d{1,12}) milliseconds|in (\d{1,12}) ?ms\b")


def without_echoes(roots: Sequence[Sighting], ends: Iterable[Sighting]) -> list[Sighting]:
    """The roots that may have caused the others; `ends` tell of processes that ended, nobody knows why.

    A collective that runs out of time hangs since before: what a peer reports less than half that time earlier, or later,
    is no cause of it. A signal to stop after a process has failed is how its launcher clears up.
    """
    timeouts = [it for it in roots if it.rule.name == _TIMED_OUT]
    hung_s = max((_timeout_s(it.line.text) for it in timeouts), default=0.0)
    broken = [it for it in roots if it.weight in {ECHO, STUCK} and it.rule.name not in _STOPS]
    dead = [*broken, *(it for it in ends if it.rule.name not in HINTS)]

    def answers(it: Sighting) -> bool:
        if it.rule.name in _STOPS:
            return any(_follows(it, other) for other in (dead if it.rule.name == "told-to-stop" else broken))
        return it.rule.kind in _REMOTE and any(_follows(it, other, hung_s / 2) for other in timeouts)

    return [it for it in roots if not answers(it)]


def _timeout_s(text: str) -> float:
    found = _TIMEOUT.search(text)
    return int(next(filter(None, found.groups()), 0)) / 1000 if found else 0.0


def _follows(later: Sighting, earlier: Sighting, margin_s: float = 0.0) -> bool:
    """Whether one was told after another, or at most `margin_s` before it.

    Of two files only a line with a time of its own says so: another may have been written long after the one before it.
    """
    if later.line.file == earlier.line.file:
        return later.order > earlier.order
    after, before = later.line.at, earlier.line.at
    return earlier.timed and after is not None and before is not None and after >= before - margin_s
