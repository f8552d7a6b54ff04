"""Has a rank stopped? The time since its last sign of life against a robust baseline of its own pace. Pure.

There are two limits. What scatters may be silent for as long as a long iteration takes; but a rank of which it is known that
it has done nothing for a whole iteration is in no long one, and then three times the mean is enough. That a GPU is idle, or
cannot be asked, is never held against a rank; that it works speaks for it. A baseline belongs to one rank of one generation,
so that every transition makes it be learned anew.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from math import exp, inf, log

from unicron_lib.detection.sections import PACED, Limits, Section

WARM_UP = 5
"""Iterations, after the first one, that have to be known before a paced section is judged by them."""
YOUNG = 16
"""A baseline of fewer iterations may have missed the longer ones: its limit is twice as wide."""
KEPT = 512
FLOOR_S = 0.3
"""Shorter silences are told of nobody: schedulers, garbage collectors and the watcher itself take their time."""
QUARTILES_TO_SIGMA = 1.349
STILL_SHARE = 0.9
"""Of the hang factor, for who does nothing: a baseline knows the mean only about, and three times the true one is the limit."""
STILL_S = 0.2
"""Who has done nothing for a shorter time may just have waited for a lock, a file or a processor."""
SIGMAS = 10.0
"""Many, since an iteration lasts as long as its slowest rank needs, and that scatters less than what each of them needs."""
LONGER = 2.5
"""Than the longest that was seen: what nothing is believed to take, however iterations scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's newest sign of life, `at` by the monotonic clock, seconds.

    `iteration` is the last complete one, `iteration_s` its duration without sections that have limits of their own (0: not
    known). `marks` counts the signs. `pause` is the evaluation or checkpoint that the rank has made since then, which
    others may still be in.
    """

    iteration: int
    section: Section
    marks: int
    at: float
    iteration_s: float = 0.0
    pause: Section | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A rank is silent for longer than it may be; `usual_s` is its usual iteration, 0 if that is not known.

    `still_s` is for how long it is known to have done nothing, 0 if that is not known, or it works.
    """

    iteration: int
    section: Section
    silent_s: float
    limit_s: float
    usual_s: float
    still_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A rank that was told to be stalled goes on, after `silent_s`."""

    iteration: int
    silent_s: float


class Baseline:
    """The newest durations of iterations, as logarithms, in order: quantiles cost nothing."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []
        self._sum_s = 0.0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, duration_s: float) -> None:
        """Take in a duration; the oldest of more than `KEPT` is forgotten."""
        value = log(duration_s)
        self._newest.append(value)
        self._sum_s += duration_s
        insort(self._sorted, value)
        if len(self._newest) > KEPT:
            oldest = self._newest.popleft()
            self._sum_s -= exp(oldest)
            del self._sorted[bisect_left(self._sorted, oldest)]

    @property
    def mean_s(self) -> float:
        """The mean duration."""
        return self._sum_s / len(self._sorted)

    @property
    def median_s(self) -> float:
        """The usual duration."""
        return exp(self._sorted[len(self._sorted) // 2])

    def limit_s(self, factor: float, most_s: float = inf) -> float:
        """What no normal iteration takes: `factor` times the median, or more if they scatter.

        They scatter if the quartiles say so, but no more than by `LONGER` beyond the longest that was seen. It is at most
        `most_s`, unless longer ones were seen.
        """
        count = len(self._sorted)
        median, longest = self.median_s, exp(self._sorted[-1])
        sigma = (self._sorted[3 * count // 4] - self._sorted[count // 4]) / QUARTILES_TO_SIGMA
        scattered = min(median * exp(min(SIGMAS * sigma, 50.0)), LONGER * longest)
        seen = 1.25 * longest
        limit = max(factor * median, scattered, seen)
        return max(seen, min(most_s, 2 * limit if count < YOUNG else limit))


class Pace:
    """The pace of one rank in one generation."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._baseline = Baseline()
        self._limit_s = 0.0
        self._mean_s = 0.0
        self._iteration: int | None = None
        self._outliers: list[float] = []
        self._in_a_row = 0
        self._not_before = 0.0
        self._told: Beat | None = None

    def look(self, beat: Beat, now: float, *, still_s: float = 0.0) -> Stalled | Resumed | None:
        """What is new at `now` (monotonic): each stall is told once, and its end if there is one.

        The rank, and all that it may wait for, is known to have done nothing for `still_s`.
        """
        if self._told and beat.marks != self._told.marks:
            resumed = Resumed(iteration=beat.iteration, silent_s=max(0.0, beat.at - self._told.at))
            self._told = None
            return resumed
        self._learn(beat)
        silent_s = self._silent_s(beat, now)
        if self._told or silent_s <= FLOOR_S:
            return None
        limit_s = self.limit_s(beat.section, beat.pause)
        early_s = self._early_s(beat) if still_s >= max(STILL_S, self._mean_s) else None
        if early_s is not None and limit_s is not None:
            limit_s = min(limit_s, early_s)
        if limit_s is None or silent_s <= limit_s:
            return None
        self._told = beat
        return Stalled(
            iteration=beat.iteration,
            section=beat.section,
            silent_s=silent_s,
            limit_s=limit_s,
            usual_s=self.usual_s,
            still_s=still_s,
        )

    def is_doubtful(self, beat: Beat, now: float) -> bool:
        """Whether it begins to matter if the rank does anything: half of the limit of who does nothing has passed."""
        early_s = self._early_s(beat)
        return early_s is not None and self._silent_s(beat, now) > early_s / 2

    def restart_clock(self, now: float) -> None:
        """Nobody has looked for a while: silence counts from `now` on."""
        self._not_before = now

    @property
    def usual_s(self) -> float:
        """The usual duration of an iteration, 0 as long as too few are known."""
        return self._baseline.median_s if self._is_warm else 0.0

    def limit_s(self, section: Section, pause: Section | None = None) -> float | None:
        """How long the rank may be silent in `section`; None: for ever.

        Who waits for others after a `pause` waits as long as the others may be in it: they may be on other nodes.
        """
        if section not in PACED:
            return self._limits.fixed_s.get(section)
        if section is Section.COLLECTIVE and pause is not None:
            return max(self._paced_s, self._limits.fixed_s[pause])
        return self._paced_s

    def _silent_s(self, beat: Beat, now: float) -> float:
        return now - max(beat.at, self._not_before)

    def _early_s(self, beat: Beat) -> float | None:
        """How long a rank that does nothing may be silent; None: as long as any. After a pause others may still be in it."""
        waits_for_pause = beat.section is Section.COLLECTIVE and beat.pause is not None
        if beat.section not in PACED or waits_for_pause or self._limits.step_s is not None or not self._is_warm:
            return None
        return max(FLOOR_S, STILL_SHARE * self._limits.hang_factor * self._mean_s)

    @property
    def _paced_s(self) -> float:
        own_s = self._limits.step_s
        if self._iteration is None or (own_s is None and not self._is_warm):
            return self._limits.unlearned_s
        return max(FLOOR_S, self._limit_s) if own_s is None else own_s

    @property
    def _is_warm(self) -> bool:
        return len(self._baseline) >= WARM_UP

    def _learn(self, beat: Beat) -> None:
        """Take in a complete iteration. The first one is special; one beyond the limit is not normal, unless there are more."""
        if beat.iteration == self._iteration or not beat.iteration_s > 0.0:
            return
        is_first, self._iteration = self._iteration is None, beat.iteration
        if is_first:
            return
        learned = [beat.iteration_s]
        if self._is_warm and beat.iteration_s > self._limit_s:
            self._outliers.append(beat.iteration_s)
            self._in_a_row += 1
            if len(self._outliers) < WARM_UP:
                return
            if self._in_a_row >= WARM_UP:
                self._baseline = Baseline()  # they are the new pace
            learned, self._outliers = self._outliers, []
        self._in_a_row = 0
        for duration_s in learned:
            self._baseline.add(duration_s)
        self._mean_s = self._baseline.mean_s
        self._limit_s = self._baseline.limit_s(self._limits.hang_factor, self._limits.most_s)
