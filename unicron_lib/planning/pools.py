"""Several kinds of instances: each job uses one pool, and pools have prices, a budget, quotas and reliabilities.

On-demand and spot instances of one type are two pools. A recovery keeps every job in its pool: the pools are then
knapsacks of their own, solved in milliseconds. What moves between pools is for `rebalancing`, in the background.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from unicron_lib.errors import UserError
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.milp import Solution
from unicron_lib.planning.waf import Demand

ROUNDING = 1e-9
"""Relative: sums of prices are floats."""

Share = Callable[[Request], Allocation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """`num_gpus` healthy GPUs of one kind; `mtbf_gpu_s` is the mean time between failures, or reclaims, of one of them.

    Raises UserError for a price that is negative or a time that is not above zero.
    """

    name: str
    num_gpus: int
    mtbf_gpu_s: float
    dollars_per_gpu_h: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mtbf_gpu_s) and self.mtbf_gpu_s > 0):
            raise UserError(f"pool {self.name}: mtbf_gpu_s is {self.mtbf_gpu_s}, it must be a finite number above 0")
        if not (math.isfinite(self.dollars_per_gpu_h) and self.dollars_per_gpu_h >= 0):
            found = self.dollars_per_gpu_h
            raise UserError(f"pool {self.name}: dollars_per_gpu_h is {found}, it must be a finite number and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A job, where it is now, and what it does in each pool that it may use.

    `demand` describes it in the pool that it is in; of a job that runs nowhere `pool` is where a recovery may start it,
    or "". `elsewhere` maps other pools to T(t, x) by size there.
    """

    demand: Demand
    pool: str = ""
    tenant: str = ""
    elsewhere: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """The pools, who wants them, and the limits: dollars an hour in all, and GPUs by tenant."""

    pools: tuple[Pool, ...]
    offers: tuple[Offer, ...]
    budget_dollars_per_h: float = math.inf
    quotas_gpus: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """GPUs and pool by job; `pool` lacks jobs that get nothing. Gain and bound in FLOP, as of `Allocation`."""

    gpus: Mapping[str, int]
    pool: Mapping[str, str]
    dollars_per_h: float
    gain: float
    upper_bound: float
    gap: float
    optimal: bool
    method: str
    solve_s: float
    notes: tuple[str, ...] = ()


def dollars_per_h(market: Market, gpus: Mapping[str, int], pool: Mapping[str, str]) -> float:
    """What the GPUs that jobs hold cost."""
    price = {each.name: each.dollars_per_gpu_h for each in market.pools}
    return math.fsum(price[pool[job]] * count for job, count in gpus.items() if count)


def excess(market: Market, gpus: Mapping[str, int], pool: Mapping[str, str]) -> str:
    """Which limit an allocation exceeds, "" if none: capacity, budget, or the quota of a tenant."""
    for each in market.pools:
        used = sum(count for job, count in gpus.items() if count and pool[job] == each.name)
        if used > each.num_gpus:
            return f"pool {each.name} has {each.num_gpus} GPUs, {used} would be used"
    spent = dollars_per_h(market, gpus, pool)
    if spent > market.budget_dollars_per_h * (1 + ROUNDING):
        return f"the budget is {market.budget_dollars_per_h:g} dollars an hour, {spent:g} would be spent"
    for tenant, quota in sorted(market.quotas_gpus.items()):
        used = sum(gpus[offer.demand.job] for offer in market.offers if offer.tenant == tenant)
        if used > quota:
            return f"tenant {tenant} has a quota of {quota} GPUs, {used} would be used"
    return ""


def recover(market: Market, *, timer: Callable[[], float]) -> PoolPlan:
    """The best allocation that leaves every job in its pool: one knapsack a pool, each until the next failure there.

    Without the solver, so that it takes milliseconds in a cold process too. If sharing out anew would exceed the budget
    or a quota, no job grows. Raises NotEnoughGpus if the jobs that must run do not fit into their pools.
    """

    def share(request: Request) -> Allocation:
        return allocate(request, timer=timer, solve=no_solver)

    plan = _pinned(market, share)
    homeless = sorted(offer.demand.job for offer in market.offers if not offer.pool)
    waiting = (f"In no pool, so that only rebalancing starts them: {', '.join(homeless)}",) if homeless else ()
    plan = replace(plan, notes=waiting)
    broken = excess(market, plan.gpus, plan.pool)
    if not broken:
        return plan
    kept = replace(market, offers=tuple(_not_growing(offer) for offer in market.offers))
    capped = _pinned(kept, share)
    still = excess(market, capped.gpus, capped.pool)
    notes = (f"No job grows, since {broken}", *([f"Only rebalancing helps: {still}"] if still else []), *waiting)
    # the bound is that of the pools without budget and quotas, which bounds what is within them too
    bound = max(plan.upper_bound, capped.gain)
    gap = (bound - capped.gain) / abs(bound) if bound else 0.0
    return replace(capped, upper_bound=bound, gap=gap, optimal=gap == 0.0, method="capped", notes=notes)


def no_solver(tables: object, capacity: int, *, time_limit_s: float) -> Solution:  # noqa: ARG001
    """In place of `milp.solve`: leaves the rest to the dynamic programme."""
    return Solution(counts=None, proved=False, status="the solver was not asked")


def _pinned(market: Market, share: Share) -> PoolPlan:
    found: list[Allocation] = []
    pool: dict[str, str] = {}
    gpus = {offer.demand.job: 0 for offer in market.offers}
    for each in market.pools:
        demands = tuple(offer.demand for offer in market.offers if offer.pool == each.name)
        found.append(share(Request(demands=demands, num_gpus=each.num_gpus, mtbf_gpu_s=each.mtbf_gpu_s)))
        gpus |= found[-1].gpus
        pool |= {job: each.name for job, count in found[-1].gpus.items() if count}
    gain, bound = (math.fsum(values) for values in zip(*((it.gain, it.upper_bound) for it in found), strict=True))
    optimal = all(allocation.optimal for allocation in found)
    return PoolPlan(
        gpus=gpus,
        pool=pool,
        dollars_per_h=dollars_per_h(market, gpus, pool),
        gain=gain,
        upper_bound=bound,
        gap=0.0 if optimal or not bound else (bound - gain) / abs(bound),
        optimal=optimal,
        method="pinned",
        solve_s=math.fsum(allocation.solve_s for allocation in found),
    )


def _not_growing(offer: Offer) -> Offer:
    """Its sizes up to the present one, or to the smallest if it must run."""
    demand = offer.demand
    most = max(demand.current_gpus, demand.min_gpus if demand.must_run else 0)
    sizes = {size: flops for size, flops in demand.throughput_flops.items() if size <= most}
    return replace(offer, demand=replace(demand, throughput_flops=sizes))
