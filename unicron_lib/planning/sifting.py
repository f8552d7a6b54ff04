"""Large choices: prices of the limits first, then only the columns that are worth their price go to the solver.

Any prices that are not negative give a bound: what all limits are worth at them, and the best column of each owner after
paying for what it uses. A column that loses more against that than the bound exceeds a known choice is part of none better.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from unicron_lib.planning import milp
from unicron_lib.planning.knapsack import Floats, Integers

FEW_COLUMNS = 600
"""So many go to the solver as they are."""

ROUNDS = 400
ROUNDING = 0.01


def choose(
    gains: Integers,
    owners: Integers,
    uses: Floats,
    limits: Floats,
    *,
    time_limit_s: float,
    rel_gap: float,
    timer: Callable[[], float],
) -> milp.Choice:
    """As `milp.choose`, for any number of columns; `owners` must be ascending.

    Half of the time goes to the columns that look best, the rest to all that may still be part of something better.
    """
    if len(gains) <= FEW_COLUMNS:
        return milp.choose(gains, owners, uses, limits, time_limit_s=time_limit_s, rel_gap=rel_gap)
    ends = timer() + time_limit_s
    prices, upper = priced(gains, owners, uses, limits)
    lost = losses(gains, owners, uses, prices)
    few = lost <= np.partition(lost, FEW_COLUMNS)[FEW_COLUMNS]
    first = _among(few, gains, owners, uses, limits, time_limit_s=time_limit_s / 2, rel_gap=rel_gap)
    if first.columns is None:
        left_s = max(0.0, ends - timer())
        whole = milp.choose(gains, owners, uses, limits, time_limit_s=left_s, rel_gap=rel_gap)
        return replace(whole, upper=min(upper, whole.upper))
    lower = int(gains[list(first.columns)].sum())
    core = lost <= upper - lower + ROUNDING
    if first.proved and not (core & ~few).any():
        return replace(first, upper=max(float(lower), min(upper, first.upper)))
    found = replace(first, upper=max(float(lower), upper), proved=False)
    left_s = ends - timer()
    if upper - lower <= rel_gap * abs(upper) or left_s <= 0:
        return found
    second = _among(core, gains, owners, uses, limits, time_limit_s=left_s, rel_gap=rel_gap)
    bound = max(float(lower), min(upper, second.upper))
    is_better = second.columns is not None and int(gains[list(second.columns)].sum()) >= lower
    return replace(second, upper=bound) if is_better else replace(found, upper=bound)


def priced(gains: Integers, owners: Integers, uses: Floats, limits: Floats) -> tuple[Floats, float]:
    """Prices of the limits, and the bound that they give: the least of a subgradient descent.

    Step lengths fall with the rounds, in parts of the gain at stake; rows are scaled to their limits.
    """
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    scaled = uses / np.maximum(limits, 1.0)[:, None]
    room = limits / np.maximum(limits, 1.0)
    best_prices, best = np.zeros(len(limits)), np.inf
    prices = np.zeros(len(limits))
    stake = float(np.maximum.reduceat(gains, starts).sum() - np.minimum.reduceat(gains, starts).sum()) or 1.0
    for number in range(ROUNDS):
        reduced = gains - prices @ scaled
        tops = np.maximum.reduceat(reduced, starts)
        bound = float(tops.sum() + prices @ room)
        if bound < best:
            best_prices, best = prices, bound
        hit = np.flatnonzero(reduced == tops[owners])
        picked = hit[np.flatnonzero(np.diff(owners[hit], prepend=-1))]
        slope = room - scaled[:, picked].sum(axis=1)
        length = float(np.linalg.norm(slope))
        if length == 0.0:
            break
        # around the best so far, in ever smaller steps
        base = best_prices if number % 20 == 0 else prices
        prices = np.maximum(0.0, base - slope / length * stake * 0.5 * 0.98**number)
    return best_prices / np.maximum(limits, 1.0), best


def losses(gains: Integers, owners: Integers, uses: Floats, prices: Floats) -> Floats:
    """What each column loses against its owner's best one at these prices."""
    reduced = gains - prices @ uses
    starts = np.flatnonzero(np.diff(owners, prepend=-1))
    worth: Floats = np.maximum.reduceat(reduced, starts)[owners] - reduced
    return worth


def _among(
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]],
    gains: Integers,
    owners: Integers,
    uses: Floats,
    limits: Floats,
    *,
    time_limit_s: float,
    rel_gap: float,
) -> milp.Choice:
    indices = np.flatnonzero(kept)
    found = milp.choose(gains[indices], owners[indices], uses[:, indices], limits, time_limit_s=time_limit_s, rel_gap=rel_gap)
    columns = None if found.columns is None else tuple(indices[list(found.columns)].tolist())
    return replace(found, columns=columns)
