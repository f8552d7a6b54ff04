"""Sharing out a live cluster of several pools: in a recovery every job stays in its pool, else all of them are looked at."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unicron_lib.domain.cluster import Node
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Slot
from unicron_lib.planning import placement, pools, rebalancing
from unicron_lib.planning.allocation import Allocation
from unicron_lib.planning.fitting import Fitted
from unicron_lib.planning.placement import CannotBePlaced, Method, Placement, Rules
from unicron_lib.planning.pool_rules import PoolPrice, PoolRules
from unicron_lib.planning.pools import Market, Offer, Pool, PoolPlan
from unicron_lib.planning.waf import Demand

Slots = tuple[Slot, ...]
Table = Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledJob:
    """A job of the cluster: `demand` as it is where it runs, and the pools that it may use with T(t, x) there.

    `current` are the GPUs that it holds, of which some may be gone.
    """

    demand: Demand
    tables: Mapping[str, Table]
    current: Slots = ()
    tenant: str = ""


def share(
    market: Market,
    nodes: Sequence[Node],
    current: Mapping[str, Slots],
    *,
    places: Rules,
    groups: Callable[[Mapping[str, int]], Mapping[str, int]],
    may_move: bool,
    time_limit_s: float,
    timer: Callable[[], float],
) -> Fitted:
    """Allocation and placement on `nodes`; jobs hold the GPUs `current` and, with `may_move`, change pools where that pays.

    `groups` gives the GPUs of a job's tensor-parallel group, by job, for an allocation. A job that has no place in its pool
    waits. Raises NotEnoughGpus or InfeasibleError if the jobs that must run do not fit.
    """
    if may_move:
        plan = rebalancing.rebalance(market, timer=timer, time_limit_s=time_limit_s)
    else:
        plan = pools.recover(market, timer=timer)
    placed, homeless = _placed(plan, nodes, current, replace(places, group_gpus=groups(plan.gpus)))
    notes = (*plan.notes, *_moves(market, plan), *_costs(market, plan), *homeless)
    return Fitted(allocation=_allocation(plan, placed, complete=not homeless), placement=placed, notes=notes)


def is_pooled(specs: Iterable[JobSpec], nodes: Iterable[Node]) -> bool:
    """Whether it matters where a job runs: there are several pools, or a job names one."""
    return len({node.pool for node in nodes}) > 1 or any(spec.pool or spec.throughput_by_pool for spec in specs)


def tables(spec: JobSpec, known: Mapping[int, float], *, pools: Collection[str], home: str | None) -> dict[str, Table]:
    """T(t, x) in each pool that the job may use: its own tables by pool, else `known`, which is that of its `home`.

    What was measured or modelled holds for the home alone, once there is one; a table that the user gave holds anywhere.
    """
    allowed = [name for name in pools if spec.pool in {"", name}]
    if spec.throughput_by_pool:
        given = {name: spec.throughput_by_pool[name] for name in allowed if name in spec.throughput_by_pool}
        return {name: {x: t for x, t in sorted(table.items()) if spec.admits(x)} for name, table in given.items()}
    if spec.throughput_flops or home is None or any(it.throughput_flops for it in spec.parallel_layouts):
        return dict.fromkeys(allowed, known)
    return {name: known for name in allowed if name == home}


def market_of(
    jobs: Sequence[PooledJob], nodes: Sequence[Node], *, home: Mapping[str, str], rules: PoolRules, mtbf_gpu_s: float
) -> Market:
    """The cluster as the market of its pools."""
    names = dict.fromkeys([*sorted({node.pool for node in nodes}), *sorted(set(home.values()))])
    made = [_pool(name, nodes, rules.pools.get(name, PoolPrice()), mtbf_gpu_s) for name in names]
    present = {job.tenant for job in jobs}
    return Market(
        pools=tuple(made),
        offers=tuple(_offer(job, home) for job in jobs),
        budget_dollars_per_h=rules.budget,
        quotas_gpus={tenant: quota for tenant, quota in rules.quotas_gpus.items() if tenant in present},
    )


def _pool(name: str, nodes: Sequence[Node], known: PoolPrice, mtbf_gpu_s: float) -> Pool:
    return Pool(
        name=name,
        num_gpus=sum(node.num_gpus for node in nodes if node.pool == name),
        mtbf_gpu_s=known.mtbf_gpu_s or mtbf_gpu_s,
        dollars_per_gpu_h=known.dollars_per_gpu_h,
    )


def _offer(job: PooledJob, home: Mapping[str, str]) -> Offer:
    """A job that runs nowhere, and may use one pool only, is at home there: a recovery may start it."""
    there = {home[slot.node] for slot in job.current if slot.node in home}
    names = list(there) or (list(job.tables) if len(job.tables) == 1 else [])
    pool = names[0] if names else ""
    own = job.tables.get(pool, {}) if pool or "" in job.tables else {}
    elsewhere = {name: table for name, table in job.tables.items() if name != pool}
    return Offer(demand=replace(job.demand, throughput_flops=own), pool=pool, tenant=job.tenant, elsewhere=elsewhere)


def _placed(
    plan: PoolPlan, nodes: Sequence[Node], current: Mapping[str, Slots], places: Rules
) -> tuple[Placement, tuple[str, ...]]:
    parts: list[Placement] = []
    notes: list[str] = []
    slots: dict[str, Slots] = dict.fromkeys(plan.gpus, ())
    for pool in sorted(set(plan.pool.values())):
        wanted = {job: gpus for job, gpus in plan.gpus.items() if gpus and plan.pool[job] == pool}
        inside = [node for node in nodes if node.pool == pool]
        while True:
            try:
                parts.append(placement.arrange(wanted, current, inside, places))
                break
            except CannotBePlaced as error:
                notes.append(f"{error} in pool {pool} on {wanted.pop(error.job)} GPUs")
        slots |= parts[-1].slots
    whole = Placement(
        slots=slots,
        moved=sum(part.moved for part in parts),
        racks=sum(part.racks for part in parts),
        certified=all(part.certified for part in parts),
        method=max((part.method for part in parts), default=Method.PACKED),
    )
    return whole, tuple(notes)


def _allocation(plan: PoolPlan, placed: Placement, *, complete: bool) -> Allocation:
    optimal = plan.optimal and complete
    return Allocation(
        gpus={job: len(slots) for job, slots in sorted(placed.slots.items())},
        gain=plan.gain,
        upper_bound=plan.upper_bound,
        gap=plan.gap,
        optimal=optimal,
        method=plan.method,
        solve_s=plan.solve_s,
        reason="the optimum of the pools" if optimal else "the best that was found for the pools",
    )


def _moves(market: Market, plan: PoolPlan) -> tuple[str, ...]:
    moves = [
        f"{offer.demand.job} {offer.pool} -> {plan.pool[offer.demand.job]}"
        for offer in market.offers
        if offer.demand.current_gpus and plan.pool.get(offer.demand.job, offer.pool) != offer.pool
    ]
    return (f"Jobs change pools: {', '.join(moves)}",) if moves else ()


def _costs(market: Market, plan: PoolPlan) -> tuple[str, ...]:
    paid = any(pool.dollars_per_gpu_h for pool in market.pools)
    return (f"The GPUs that jobs hold cost {plan.dollars_per_h:.2f} dollars an hour",) if paid else ()
