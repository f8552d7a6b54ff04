"""Summaries of a job's iterations, 16 at a time: what each rank needs for its own part, compared with the others. Pure.

Ranks are compared iteration by iteration, so that what lengthens an iteration for all of them, such as long sequences,
says nothing about any of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, log
from statistics import median

WINDOW = 16
LATE = 2
"""Iterations that a window stays open after its last one, for reports that are under way."""
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Iterations from `first` on, in medians.

    `excess` is the logarithm of what a rank needs for its own part, `compute_s`, as a multiple of what the others need.
    The spreads are robust standard deviations of the logarithm from iteration to iteration: `spread` of the excess over all
    ranks, `iteration_spread` of the duration of the iterations.
    """

    first: int
    iteration_s: float
    iteration_spread: float
    spread: float
    excess: dict[int, float]
    compute_s: dict[int, float]


@dataclass(slots=True)
class Windows:
    """Collects the reports of one generation; `newest` is its newest complete window."""

    newest: Window | None = None
    _first: int = -1
    _iterations: dict[int, dict[int, float]] = field(default_factory=dict)
    _durations: dict[int, float] = field(default_factory=dict)

    def add(self, rank: int, iteration: int, *, compute_s: float, iteration_s: float) -> None:
        """Take in a rank's report of an iteration; one that was not measured, or comes too late, is left out."""
        if not (isfinite(compute_s) and isfinite(iteration_s) and min(compute_s, iteration_s) > 0.0):
            return
        begun = iteration // WINDOW * WINDOW
        if self._first < 0:
            self._first = begun
        if iteration < self._first:
            return
        if iteration >= self._first + WINDOW + LATE:
            self._close(begun if iteration - begun >= LATE else begun - WINDOW)
        self._iterations.setdefault(iteration, {})[rank] = compute_s
        self._durations[iteration] = max(iteration_s, self._durations.get(iteration, 0.0))

    def _close(self, first: int) -> None:
        done = range(self._first, self._first + WINDOW)
        self.newest = _summary(
            self._first,
            [found for number in done if len(found := self._iterations.get(number, {})) > 1],
            [log(self._durations[number]) for number in done if number in self._durations],
        )
        self._first = first
        self._iterations = {number: found for number, found in self._iterations.items() if number >= first}
        self._durations = {number: found for number, found in self._durations.items() if number >= first}


def _summary(first: int, parts: Sequence[Mapping[int, float]], durations: Sequence[float]) -> Window | None:
    if not durations:
        return None
    excesses: dict[int, list[float]] = {}
    computed: dict[int, list[float]] = {}
    for part in parts:
        for rank, excess in _excesses(part).items():
            excesses.setdefault(rank, []).append(excess)
            computed.setdefault(rank, []).append(part[rank])
    usual = median(durations)
    return Window(
        first=first,
        iteration_s=exp(usual),
        iteration_spread=_spread(durations),
        spread=median(_spread(values) for values in excesses.values()) if excesses else 0.0,
        excess={rank: median(values) for rank, values in sorted(excesses.items())},
        compute_s={rank: median(values) for rank, values in sorted(computed.items())},
    )


def _excesses(part: Mapping[int, float]) -> dict[int, float]:
    """The logarithm of each rank's part over the median of the others'."""
    order = sorted(part, key=part.__getitem__)
    values = [log(part[rank]) for rank in order]
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    return {
        rank: values[place] - (values[low + (low >= place)] + values[high + (high >= place)]) / 2
        for place, rank in enumerate(order)
    }


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values)
