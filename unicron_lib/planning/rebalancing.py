"""Moving jobs between pools: one integer programme over all of them, in the background, with a time limit and a gap.

The horizon is the time until the next failure anywhere. A job in a pool that is less reliable than the best one is
interrupted more often; each time costs its transition, so that its throughput there counts for less. What all pools
have in common is left out, as in the paper: with one pool this is its knapsack.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unicron_lib.errors import InfeasibleError
from unicron_lib.planning import gains, milp, pools, sifting
from unicron_lib.planning.knapsack import Floats
from unicron_lib.planning.pools import Market, Offer, Pool, PoolPlan
from unicron_lib.planning.waf import Demand, gain

GOOD_ENOUGH = 1e-4
"""Relative gap at which the solver may stop: what is left is less than throughputs are known to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One thing that a job may get: `gain` in units, `flop` as it is; `pool` None for no GPUs."""

    owner: int
    pool: Pool | None
    gpus: int
    gain: int
    flop: float


def horizon_s(market: Market) -> float:
    """Seconds until the next failure in any pool is expected, 0 without GPUs."""
    rate = math.fsum(pool.num_gpus / pool.mtbf_gpu_s for pool in market.pools)
    return 1 / rate if rate else 0.0


def rebalance(
    market: Market, *, timer: Callable[[], float], time_limit_s: float = 10.0, rel_gap: float = GOOD_ENOUGH
) -> PoolPlan:
    """The best allocation that the solver finds over all pools, within budget and quotas.

    Only moves that pay are in it: any one of them, taken back where that fits, would lose gain. If the solver finds
    nothing better, everything stays as `recover` would have it. Raises InfeasibleError if the jobs that must run cannot.
    """
    started = timer()
    columns, unit = _columns(market)
    _check(market, columns)
    uses, limits = _rows(market, columns)
    owners = np.array([column.owner for column in columns], dtype=np.int64)
    worth = np.array([column.gain for column in columns], dtype=np.int64)
    choice = sifting.choose(worth, owners, uses, limits, time_limit_s=time_limit_s, rel_gap=rel_gap, timer=timer)
    chosen = _picked(market, columns, choice)
    method = "milp" if chosen else "pinned"
    chosen = chosen or _as_recovered(market, unit, timer)
    if chosen is None:
        raise InfeasibleError(f"the jobs that must run do not fit into the pools, the budget and the quotas ({choice.status})")
    settled = _paying(market, columns, chosen)
    units = sum(column.gain for column in settled)
    upper = min(choice.upper, float(sum(worth[owners == owner].max() for owner in set(owners.tolist()))))
    total = math.fsum(column.flop for column in settled)
    optimal = upper - units < 1
    bound = total if optimal else total + (upper - units + 2 * len(settled)) * unit
    found = _plan(market, settled)
    return replace(
        found,
        gain=total,
        upper_bound=bound,
        gap=0.0 if optimal else (bound - total) / max(abs(bound), unit),
        optimal=optimal,
        method=method,
        solve_s=timer() - started,
    )


def in_pool(market: Market, offer: Offer, pool: Pool) -> Demand | None:
    """The job as `pool` would have it, None if it cannot run there. Whoever comes from another pool moves."""
    is_home = pool.name == offer.pool
    table = offer.demand.throughput_flops if is_home else offer.elsewhere.get(pool.name, {})
    if not table:
        return None
    more = 1 / pool.mtbf_gpu_s - min(1 / each.mtbf_gpu_s for each in market.pools)
    lost_s = more * offer.demand.transition_s
    risky = {size: flops / (1 + size * lost_s) for size, flops in table.items()}
    return replace(offer.demand, throughput_flops=risky, faulted=offer.demand.faulted or not is_home)


def _columns(market: Market) -> tuple[list[_Column], float]:
    """What each job may get, without what is worth no more than a smaller size in the same pool, and the FLOP of a unit."""
    expected_s, total = horizon_s(market), sum(pool.num_gpus for pool in market.pools)
    found: list[tuple[int, Pool, Demand]] = []
    for owner, offer in enumerate(market.offers):
        there = ((pool, in_pool(market, offer, pool)) for pool in market.pools)
        found += [(owner, pool, demand) for pool, demand in there if demand]
    figures = (gains.largest(demand, num_gpus=pool.num_gpus, expected_s=expected_s) for _, pool, demand in found)
    scale = gains.scale_of(figures, num_jobs=len(market.offers), num_gpus=total)
    columns = [_nothing(owner, offer, scale.unit) for owner, offer in enumerate(market.offers) if not offer.demand.must_run]
    for owner, pool, demand in found:
        if demand.must_run and demand.min_gpus > pool.num_gpus:
            continue
        table = gains.options(demand, num_gpus=pool.num_gpus, expected_s=expected_s, scale=scale)
        pairs = zip(table.counts.tolist(), table.gains.tolist(), strict=True)
        columns += [
            _Column(owner=owner, pool=pool, gpus=size, gain=units, flop=gain(demand, size, expected_s=expected_s))
            for size, units in pairs
            if size
        ]
    # the solver's choice comes in the order of its columns
    return sorted(columns, key=lambda column: column.owner), scale.unit


def _nothing(owner: int, offer: Offer, unit: float) -> _Column:
    flop = gain(offer.demand, 0, expected_s=0.0)
    return _Column(owner=owner, pool=None, gpus=0, gain=round(flop / unit), flop=flop)


def _rows(market: Market, columns: Sequence[_Column]) -> tuple[Floats, Floats]:
    """Coefficients and limits: a row a pool, then the budget if there is one, then a row a quota."""
    rows = [[float(column.gpus) if column.pool == pool else 0.0 for column in columns] for pool in market.pools]
    limits = [float(pool.num_gpus) for pool in market.pools]
    if math.isfinite(market.budget_dollars_per_h):
        rows.append([column.gpus * (column.pool.dollars_per_gpu_h if column.pool else 0.0) for column in columns])
        limits.append(market.budget_dollars_per_h)
    for tenant, quota in sorted(market.quotas_gpus.items()):
        rows.append([float(column.gpus) if market.offers[column.owner].tenant == tenant else 0.0 for column in columns])
        limits.append(float(quota))
    return np.array(rows).reshape(len(rows), len(columns)), np.array(limits)


def _check(market: Market, columns: Sequence[_Column]) -> None:
    able = {column.owner for column in columns}
    stuck = [offer.demand.job for owner, offer in enumerate(market.offers) if owner not in able]
    if stuck:
        raise InfeasibleError(f"{stuck[0]} must run, but no pool has enough GPUs for it")


def _picked(market: Market, columns: Sequence[_Column], choice: milp.Choice) -> list[_Column] | None:
    """The solver's choice, None if there is none or it breaks a limit by more than the rounding of sums."""
    picked = [columns[index] for index in choice.columns or ()]
    return picked if picked and _fits(market, picked) else None


def _as_recovered(market: Market, unit: float, timer: Callable[[], float]) -> list[_Column] | None:
    """What a recovery would do, None if that cannot keep to the limits."""
    try:
        plan = pools.recover(market, timer=timer)
    except InfeasibleError:
        return None
    by_name = {pool.name: pool for pool in market.pools}
    found = []
    for owner, offer in enumerate(market.offers):
        pool, gpus = by_name.get(plan.pool.get(offer.demand.job, "")), plan.gpus[offer.demand.job]
        demand = in_pool(market, offer, pool) if pool else None
        if demand is None:
            found.append(_nothing(owner, offer, unit))
            continue
        flop = gain(demand, gpus, expected_s=horizon_s(market))
        found.append(_Column(owner=owner, pool=pool, gpus=gpus, gain=round(flop / unit), flop=flop))
    stuck = any(column.pool is None and market.offers[column.owner].demand.must_run for column in found)
    return None if stuck or not _fits(market, found) else found


def _key(market: Market, column: _Column) -> tuple[str, str | None, int]:
    return market.offers[column.owner].demand.job, column.pool.name if column.pool else None, column.gpus


def _fits(market: Market, chosen: Sequence[_Column]) -> bool:
    plan = _plan(market, chosen)
    return not pools.excess(market, plan.gpus, plan.pool)


def _paying(market: Market, columns: Sequence[_Column], chosen: Sequence[_Column]) -> list[_Column]:
    """Every move taken back that does not pay: the solver may stop before it is the optimum, and has no taste in ties."""
    settled = list(chosen)
    for index, column in enumerate(chosen):
        offer = market.offers[column.owner]
        home = (offer.demand.job, offer.pool if offer.demand.current_gpus else None, offer.demand.current_gpus)
        stays = next((each for each in columns if each.owner == column.owner and _key(market, each) == home), None)
        if stays and stays is not column and stays.gain >= column.gain:
            tried = [*settled[:index], stays, *settled[index + 1 :]]
            settled = tried if _fits(market, tried) else settled
    return settled


def _plan(market: Market, chosen: Sequence[_Column]) -> PoolPlan:
    gpus = {market.offers[column.owner].demand.job: column.gpus for column in chosen}
    pool: Mapping[str, str] = {market.offers[column.owner].demand.job: column.pool.name for column in chosen if column.pool}
    spent = pools.dollars_per_h(market, gpus, pool)
    return PoolPlan(
        gpus=gpus,
        pool=pool,
        dollars_per_h=spent,
        gain=0.0,
        upper_bound=0.0,
        gap=0.0,
        optimal=False,
        method="",
        solve_s=0.0,
    )
