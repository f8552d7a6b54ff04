"""Which rank slows its job down, or is the job as a whole slower than it was? Pure.

A rank that is a bit slow shows in quiet jitter within two windows; the more the iterations scatter, the more windows it takes
to tell it from chance. Both an effect that matters and a significant one are asked for.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import median

from unicron_lib.detection.windows import WINDOW, Window
from unicron_lib.domain.events import StragglerCleared, StragglerDetected
from unicron_lib.domain.jobs import JobState

DEGRADED = 1.1
"""Slower by this factor is degraded (paper, section 4)."""
CLEARED = 1.05
SIGMAS = 6.0
LOOKBACKS = (2, 4, 8, 16, 32)
"""Numbers of windows that are judged together, the newest ones."""
BASELINE = 8
"""Windows, after the first one, that tell how fast the job as a whole is in this generation."""
MEDIAN_ERROR = 1.2533 / sqrt(WINDOW)
"""Standard error of a window's median, as a multiple of the spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`rank`, or the job as a whole if that is None, takes `ratio` times as long as it should; with `over`, no longer."""

    rank: int | None
    ratio: float
    reason: str
    over: bool = False


class _Suspect:
    """The newest excesses of one rank, or of the job, since the last thing that was told of it."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self._excess: deque[float] = deque(maxlen=max(LOOKBACKS))
        self.is_slow = is_slow

    def add(self, excess: float) -> None:
        self._excess.append(excess)

    def verdict(self, error: float, *, known_error: float = 0.0) -> tuple[float, int] | None:
        """Its excess and over how many windows, if that changes what is known; `error` is the one of a window."""
        values = list(self._excess)
        for count in LOOKBACKS:
            if count > len(values):
                return None
            mean = sum(values[-count:]) / count
            mean_error = sqrt(error**2 / count + known_error**2)
            if self.is_slow:
                changed = mean < log(CLEARED) and mean + SIGMAS / 2 * mean_error < log(DEGRADED)
            else:
                changed = mean > log(DEGRADED) and mean > SIGMAS * mean_error
            if changed:
                self.is_slow = not self.is_slow
                self._excess.clear()
                return mean, count
        return None

    def is_doubtful(self) -> bool:
        newest = list(self._excess)[-2:]
        return self.is_slow or (bool(newest) and sum(newest) / len(newest) > log(CLEARED))


class StragglerWatch:
    """Judges the windows of a job; a new generation is a new story."""

    def __init__(self) -> None:
        self._begin(-1)

    def _begin(self, generation: int) -> None:
        self._generation = generation
        self._seen = -1
        self._ranks: dict[int, _Suspect] = {}
        self._known: frozenset[str] = frozenset()
        self._job = _Suspect()
        self._spreads: deque[tuple[float, float]] = deque(maxlen=max(LOOKBACKS))
        self._baseline: list[float] = []

    def recall(self, job: JobState) -> None:
        """Take over which ranks an earlier watch has told to be slow."""
        self._begin(job.generation)
        self._known = frozenset(job.stragglers)

    def look(self, generation: int, window: Window | None) -> tuple[Finding, ...]:
        """What is new with `window`, the newest one; a window that was seen already holds no news."""
        if generation > self._generation:
            self._begin(generation)
        if window is None or generation < self._generation or window.first <= self._seen:
            return ()
        is_first, self._seen = self._seen < 0, window.first
        if is_first:
            return ()  # warming up
        self._spreads.append((window.spread, window.iteration_spread))
        found = tuple(self._judge_ranks(window))
        return found + tuple(self._judge_job(window))

    def _judge_ranks(self, window: Window) -> Iterator[Finding]:
        error = MEDIAN_ERROR * median(spread for spread, _ in self._spreads)
        for rank, excess in window.excess.items():
            suspect = self._ranks.setdefault(rank, _Suspect(is_slow=f"rank {rank}" in self._known))
            suspect.add(excess)
            if verdict := suspect.verdict(error):
                mean, count = verdict
                needs = f"needs {exp(mean):.2f} times what the others need for its own part of an iteration"
                yield Finding(
                    rank=rank,
                    ratio=exp(mean),
                    reason=f"rank {rank} {needs}, {window.compute_s[rank]:.3g} s, over {count * WINDOW} iterations",
                    over=not suspect.is_slow,
                )

    def _judge_job(self, window: Window) -> Iterator[Finding]:
        """Only if no rank explains it."""
        if len(self._baseline) < BASELINE:
            self._baseline.append(log(window.iteration_s))
            return
        if any(suspect.is_doubtful() for suspect in self._ranks.values()):
            return
        usual = median(self._baseline)
        error = MEDIAN_ERROR * median(spread for _, spread in self._spreads)
        self._job.add(log(window.iteration_s) - usual)
        if verdict := self._job.verdict(error, known_error=1.2533 * error / sqrt(BASELINE)):
            mean, count = verdict
            takes = f"an iteration takes {window.iteration_s:.3g} s, {exp(mean):.2f} times as long as at first"
            yield Finding(
                rank=None,
                ratio=exp(mean),
                reason=f"{takes}, over {count * WINDOW} iterations, and no rank is slower than the others",
                over=not self._job.is_slow,
            )


def straggler_events(
    found: tuple[Finding, ...], window: Window, *, job: str, generation: int, nodes: Mapping[int, str], now: float
) -> Iterator[StragglerDetected | StragglerCleared]:
    """The journal's events for what was found in `window`; the same whoever finds it. `nodes` is by rank."""
    for finding in found:
        name = "all" if finding.rank is None else finding.rank
        same = f"{job}/{generation}/{name}/{window.first}"
        if finding.over:
            yield StragglerCleared(id=f"cleared/{same}", at=now, job=job, generation=generation, rank=finding.rank)
            continue
        yield StragglerDetected(
            id=f"straggler/{same}",
            at=now,
            job=job,
            generation=generation,
            ratio=finding.ratio,
            reason=finding.reason,
            rank=finding.rank,
            node=None if finding.rank is None else nodes.get(finding.rank),
        )
