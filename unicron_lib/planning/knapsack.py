"""The multiple-choice knapsack: one option for each job, at most `capacity` GPUs, greatest sum of gains.

Gains are integers, so that sums are exact, ties are ties, and two ways of solving can be compared with `==`. Beside
the `gains`, options have `values`: the same order with ties broken. Bounds work on gains, the dynamic programme on
values.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = tuple[int, ...]

ROUNDING = 0.01
"""More than float sums of our integers are off by, less than one unit of gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one job may get: `counts` of GPUs, ascending, with their `gains` and tie-broken `values`."""

    counts: Integers
    gains: Integers
    values: Integers

    def __len__(self) -> int:
        return len(self.counts)

    def where(self, kept: NDArray[np.bool_]) -> "Options":
        """The options for which `kept` is true."""
        return Options(counts=self.counts[kept], gains=self.gains[kept], values=self.values[kept])

    def gain_of(self, count: int) -> int:
        """The gain of the option with `count` GPUs."""
        return int(self.gains[np.searchsorted(self.counts, count)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The LP relaxation: the `price` of a GPU, no allocation gains more than `upper`, `counts` gain `lower`."""

    price: float
    upper: float
    lower: int
    counts: Counts


def undominated(options: Options) -> Options:
    """Without the options that are worth no more than a smaller one."""
    before = np.maximum.accumulate(options.values)[:-1]
    return options.where(np.concatenate(([True], options.values[1:] > before)))


def envelope(options: Options) -> Options:
    """The corners of the upper concave envelope of the gains."""
    while len(options) > 2:
        slopes = np.diff(options.gains) / np.diff(options.counts)
        # a point under the chord of its neighbours is no corner, whatever becomes of the neighbours
        corners = np.concatenate(([True], slopes[:-1] > slopes[1:], [True]))
        if corners.all():
            break
        options = options.where(corners)
    return options


def total_gain(tables: Sequence[Options], counts: Counts) -> int:
    """The exact gain of an allocation."""
    return sum(table.gain_of(count) for table, count in zip(tables, counts, strict=True))


def relax(tables: Sequence[Options], capacity: int) -> Relaxation:
    """Solve the LP relaxation in closed form: buy segments of the concave envelopes, the steepest first.

    The smallest options of all jobs must fit into `capacity`.
    """
    corners = [envelope(table) for table in tables]
    jobs = np.repeat(np.arange(len(corners)), [len(corner) - 1 for corner in corners])
    steps = np.concatenate([np.diff(corner.counts) for corner in corners])
    slopes = np.concatenate([np.diff(corner.gains) for corner in corners]) / steps
    counts = [int(table.counts[0]) for table in tables]
    left, price, full = capacity - sum(counts), 0.0, set[int]()
    for segment in np.argsort(-slopes, kind="stable").tolist():
        job, step, slope = int(jobs[segment]), int(steps[segment]), float(slopes[segment])
        if slope <= 0 or left == 0:
            price = price or max(slope, 0.0)
            break
        if job in full:
            continue
        if step > left:
            price = price or slope
            full.add(job)
            continue
        counts[job], left = counts[job] + step, left - step
    upper = price * capacity + sum(float((table.gains - price * table.counts).max()) for table in tables)
    chosen = tuple(counts)
    return Relaxation(price=price, upper=upper, lower=total_gain(tables, chosen), counts=chosen)


def losses(table: Options, price: float) -> Floats:
    """What each option loses against the job's best one when a GPU costs `price`."""
    reduced: Floats = table.gains - price * table.counts
    worth: Floats = reduced.max() - reduced
    return worth


def contenders(tables: Sequence[Options], relaxation: Relaxation, lower: int) -> tuple[Options, ...]:
    """Only the options that may be part of an allocation that gains `lower` or more (reduced-cost fixing)."""
    slack = relaxation.upper - lower + ROUNDING
    return tuple(table.where(losses(table, relaxation.price) <= slack) for table in tables)


def promising(tables: Sequence[Options], relaxation: Relaxation, num_options: int) -> tuple[Options, ...]:
    """About `num_options` options with the smallest losses, and those of the relaxation's own allocation."""
    lost = [losses(table, relaxation.price) for table in tables]
    every = np.concatenate(lost)
    limit = float(np.partition(every, num_options)[num_options]) if num_options < len(every) else np.inf
    return tuple(
        table.where((loss <= limit) | (table.counts == count))
        for table, loss, count in zip(tables, lost, relaxation.counts, strict=True)
    )


def num_cells(tables: Sequence[Options], capacity: int) -> int:
    """The work of `best`: cells of its table that are looked at."""
    _, room = _grid(tables, capacity)
    return (room + 1) * sum(len(table) for table in tables)


def best(tables: Sequence[Options], capacity: int) -> Counts:
    """The allocation with the greatest sum of values, by dynamic programming over the GPUs.

    Among equals the jobs that come first get more. The smallest options of all jobs must fit into `capacity`.
    """
    step, left = _grid(tables, capacity)
    reached = np.zeros(left + 1, dtype=np.int64)
    picks: list[NDArray[np.int32]] = []
    for table in tables:
        reached, pick = _extend(reached, table.values, (table.counts - table.counts[0]) // step)
        picks.append(pick)
    counts: list[int] = []
    for table, pick in zip(reversed(tables), reversed(picks), strict=True):
        count = int(table.counts[pick[left]])
        left -= (count - int(table.counts[0])) // step
        counts.append(count)
    return tuple(reversed(counts))


def _grid(tables: Sequence[Options], capacity: int) -> tuple[int, int]:
    """The GPUs that all differences between options are multiples of, and how many such steps are to be shared."""
    extras = [table.counts - table.counts[0] for table in tables]
    step = int(np.gcd.reduce(np.concatenate(extras))) or 1
    left = capacity - sum(int(table.counts[0]) for table in tables)
    return step, min(left, sum(int(extra[-1]) for extra in extras)) // step


def _extend(reached: Integers, values: Integers, extras: Integers) -> tuple[Integers, NDArray[np.int32]]:
    """One more job: the best value for each number of steps, and which option reaches it."""
    extended = reached + values[0]
    pick = np.zeros(len(reached), dtype=np.int32)
    for option in range(1, len(values)):
        extra = int(extras[option])
        if extra >= len(reached):
            break
        candidates = reached[: len(reached) - extra] + values[option]
        better = candidates > extended[extra:]
        np.copyto(extended[extra:], candidates, where=better)
        pick[extra:][better] = option
    return extended, pick
