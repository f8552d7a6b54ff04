"""How a cluster is shared out: the best allocation of the planner, and the simple rules it is compared with.

The rules are the paper's comparisons (section 7): the same for all, by weight, by size of the model. A job gets the
largest size that fits into its share, and what is over goes to the jobs in turn.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from unicron_lib.planning import gains, knapsack
from unicron_lib.planning.waf import Demand
from unicron_lib.simulation.workload import SimJob

Allocation = dict[str, int]
Rule = Callable[[Sequence[SimJob], int], Allocation]


def equally(jobs: Sequence[SimJob], num_gpus: int) -> Allocation:
    """The same share for each."""
    return _by_shares(jobs, num_gpus, {job.job: 1.0 for job in jobs})


def weighted(jobs: Sequence[SimJob], num_gpus: int) -> Allocation:
    """Shares by the jobs' weights."""
    return _by_shares(jobs, num_gpus, {job.job: job.weight for job in jobs})


def sized(jobs: Sequence[SimJob], num_gpus: int) -> Allocation:
    """Shares by the parameters of the jobs' models."""
    return _by_shares(jobs, num_gpus, {job.job: job.num_params for job in jobs})


def best(jobs: Sequence[SimJob], num_gpus: int) -> Allocation:
    """The greatest WAF of a cluster in which nothing ever fails: the planner's knapsack, exactly."""
    demands = [Demand(job=job.job, weight=job.weight, throughput_flops=job.throughput_flops) for job in jobs]
    if not demands:
        return {}
    tops = [gains.largest(demand, num_gpus=num_gpus, expected_s=1.0) for demand in demands]
    scale = gains.scale_of(tops, num_jobs=len(jobs), num_gpus=num_gpus)
    tables = [gains.options(demand, num_gpus=num_gpus, expected_s=1.0, scale=scale) for demand in demands]
    return dict(zip((job.job for job in jobs), knapsack.best(tables, num_gpus), strict=True))


RULES: Mapping[str, Rule] = MappingProxyType({"equally": equally, "weighted": weighted, "sized": sized, "best": best})
"""By name."""


def _by_shares(jobs: Sequence[SimJob], num_gpus: int, shares: Mapping[str, float]) -> Allocation:
    """Round the shares down to sizes, the greatest first to the next size with what is left, as long as there is one."""
    total = sum(shares.values())
    wanted = {job.job: num_gpus * shares[job.job] / total for job in jobs}
    sizes = {job.job: sorted(job.throughput_flops) for job in jobs}
    given = {name: max((size for size in sizes[name] if size <= want), default=0) for name, want in wanted.items()}
    left = num_gpus - sum(given.values())
    # the job that is furthest below its share first; equals in the order of their names
    while step := _next(given, wanted, sizes, left):
        name, size = step
        left -= size - given[name]
        given[name] = size
    return given


def _next(
    given: Allocation, wanted: Mapping[str, float], sizes: Mapping[str, Sequence[int]], left: int
) -> tuple[str, int] | None:
    larger = {name: next((size for size in sizes[name] if size > gpus), None) for name, gpus in given.items()}
    fitting = [(name, size) for name, size in larger.items() if size is not None and size - given[name] <= left]
    return min(fitting, key=lambda step: (given[step[0]] / wanted[step[0]], step[0]), default=None)
