"""Allocation and placement together: a size that has no place is taken from its job's table, and all is shared anew.

A job with a choice of layouts first tries the next best one on that size.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from unicron_lib.planning.allocation import Allocation, Request
from unicron_lib.planning.layout_choice import Layouts
from unicron_lib.planning.placement import CannotBePlaced, Placement

NO_CHOICE = Layouts()
MAX_CUTS = 3
"""Sizes of one job that are tried in vain before it has to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """An allocation with its placement and the layouts that were left to choose from, and sentences on what it took."""

    allocation: Allocation
    placement: Placement
    layouts: Layouts = NO_CHOICE
    notes: tuple[str, ...] = ()


def fit(
    request: Request,
    *,
    share: Callable[[Request], Allocation],
    place: Callable[[Mapping[str, int], Layouts], Placement],
    layouts: Layouts = NO_CHOICE,
) -> Fitted:
    """Share and place; every allocation that cannot be placed rules out the size of the job that found no room.

    That may rule out better combinations, too: after a cut the bound of the first allocation stands, and its gap is told.
    Ends after at most `MAX_CUTS` + 1 cuts of sizes a job. Raises NotEnoughGpus as `share` does.
    """
    first: Allocation | None = None
    notes: tuple[str, ...] = ()
    cuts: Counter[str] = Counter()
    while True:
        allocation = share(request)
        first = first or allocation
        try:
            placement = place(allocation.gpus, layouts)
        except CannotBePlaced as error:
            size = allocation.gpus[error.job]
            notes += (f"{error} on {size} GPUs",)
            layouts = layouts.without_best(error.job, size)
            if other := layouts.best(error.job, size):
                request = _instead(request, error.job, size, other.flops)
                continue
            cuts[error.job] += 1
            request = _without(request, error.job, size if cuts[error.job] <= MAX_CUTS else None)
            continue
        done = _under(first, allocation) if notes else allocation
        unsure = () if placement.certified else ("Another placement might span fewer racks",)
        return Fitted(allocation=done, placement=placement, layouts=layouts, notes=notes + unsure)


def _instead(request: Request, job: str, size: int, flops: float) -> Request:
    """The request with other FLOP/s of the job on that size."""
    demands = (
        replace(demand, throughput_flops={**demand.throughput_flops, size: flops}) if demand.job == job else demand
        for demand in request.demands
    )
    return replace(request, demands=tuple(demands))


def _without(request: Request, job: str, size: int | None) -> Request:
    """The request without that size of the job, without any if `size` is None."""
    demands = tuple(
        replace(demand, throughput_flops={x: t for x, t in demand.throughput_flops.items() if size is not None and x != size})
        if demand.job == job
        else demand
        for demand in request.demands
    )
    return replace(request, demands=demands)


def _under(first: Allocation, allocation: Allocation) -> Allocation:
    """`allocation` with the bound of the `first`, which was not cut."""
    if allocation.gain >= first.upper_bound:
        return replace(allocation, upper_bound=first.upper_bound)
    gap = (first.upper_bound - allocation.gain) / max(abs(first.upper_bound), 1e-30)
    reason = "the best that was found of what can be placed"
    return replace(allocation, upper_bound=first.upper_bound, gap=gap, optimal=False, reason=reason)
