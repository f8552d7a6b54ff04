"""The options of each job in integers: what every exact way of solving works on.

Gains are rounded to one part in `FINEST_GAIN` of the greatest figure. What two jobs earn alike stays alike, whatever
their moves cost, since earnings and costs are rounded apart.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unicron_lib.errors import UserError
from unicron_lib.planning import knapsack
from unicron_lib.planning.knapsack import Floats, Integers, Options
from unicron_lib.planning.waf import Demand, cost

FINEST_GAIN = 1e9
"""Gains are rounded to one part in this of the greatest one (less when ties of very many jobs need the digits)."""

LARGEST_SUM = 2.0**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`unit` is the FLOP of one unit of gain; `ties` units of value, more than all tie-breaks together, are one of gain."""

    unit: float
    ties: int


def largest(demand: Demand, *, num_gpus: int, expected_s: float) -> float:
    """The greatest FLOP of the job's earnings and costs on up to `num_gpus` GPUs; 0.0 if it can earn nothing."""
    fitting = [flops for size, flops in demand.throughput_flops.items() if size <= num_gpus]
    # a job without a transition has no cost on any size
    costs = (cost(demand, size) for size in (demand.current_gpus, demand.current_gpus + 1, *demand.relayout_s))
    return max(demand.weight * max(fitting, default=0.0) * expected_s, *costs)


def scale_of(figures: Iterable[float], *, num_jobs: int, num_gpus: int) -> Scale:
    """The scale for jobs whose `largest` figures these are. Raises UserError if one is beyond the range of floats."""
    ties = (num_jobs + 1) * (num_gpus + 1)
    finest = min(FINEST_GAIN, LARGEST_SUM // (ties * max(1, num_jobs)))
    top = max(figures, default=0.0)
    if not math.isfinite(top):
        raise UserError("weights, throughputs and times multiply to more than a float can hold: scale the weights down")
    return Scale(unit=top / finest or 1.0, ties=ties)


def options(demand: Demand, *, num_gpus: int, expected_s: float, scale: Scale) -> Options:
    """The undominated options of a job, in the gains and values of `scale`."""
    sizes = demand.sizes(num_gpus)
    counts = np.array(sizes, dtype=np.int64)
    flops = np.array([demand.throughput_flops[size] if size else 0.0 for size in sizes], dtype=np.float64)
    # the order of the products is that of waf.earnings, or equal jobs would round differently
    earned = np.rint(demand.weight * flops * expected_s / scale.unit)
    stays = counts == demand.current_gpus
    gains = (earned - _costs(demand, counts, scale)).astype(np.int64)
    # one job more that stays outweighs any number of GPUs saved; no tie-break outweighs one unit of gain
    values = gains * scale.ties + stays * (num_gpus + 1) - counts
    return knapsack.undominated(Options(counts=counts, gains=gains, values=values))


def _costs(demand: Demand, counts: Integers, scale: Scale) -> Floats:
    """What each size costs, in units of gain: nearly always the same for all to which the job moves."""
    if demand.relayout_s:
        return np.array([np.rint(cost(demand, int(count)) / scale.unit) for count in counts], dtype=np.float64)
    staying, moving = (np.rint(cost(demand, demand.current_gpus + more) / scale.unit) for more in (0, 1))
    two: Floats = np.where(counts == demand.current_gpus, staying, moving)
    return two
