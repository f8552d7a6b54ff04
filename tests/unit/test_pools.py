"""Pools: pinned recoveries, and what moves between pools when budget, quotas and reliability count."""

import itertools
import math
import random
import time
from dataclasses import replace

import pytest

from unicron_lib.errors import InfeasibleError, UserError
from unicron_lib.planning import pools, rebalancing
from unicron_lib.planning.allocation import NotEnoughGpus, Request, allocate
from unicron_lib.planning.pools import Market, Offer, Pool
from unicron_lib.planning.waf import Demand, gain

A, B = Pool(name="a", num_gpus=8, mtbf_gpu_s=1e6, dollars_per_gpu_h=4.0), Pool(name="b", num_gpus=6, mtbf_gpu_s=1e6)


def demand(job: str, table: dict[int, float], current: int = 0, **more: object) -> Demand:
    flops = table.get(current, 0.0)
    keys = {"transition_s": 60.0} | more
    return Demand(job=job, throughput_flops=table, current_gpus=current, current_flops=flops, **keys)  # type: ignore[arg-type]


def line(per_gpu: float, most: int = 8) -> dict[int, float]:
    return {size: per_gpu * size for size in range(1, most + 1)}


def rebalance(market: Market, **more: float) -> pools.PoolPlan:
    return rebalancing.rebalance(market, timer=time.perf_counter, **({"rel_gap": 0.0} | more))  # type: ignore[arg-type]


def recover(market: Market) -> pools.PoolPlan:
    return pools.recover(market, timer=time.perf_counter)


def random_market(seed: int, *, num_pools: int = 2, num_jobs: int = 4) -> Market:
    dice = random.Random(seed)
    made = tuple(
        Pool(
            name=f"pool-{number}",
            num_gpus=dice.randint(2, 8),
            mtbf_gpu_s=dice.choice((1e4, 1e5, 1e6)),
            dollars_per_gpu_h=dice.choice((0.0, 1.5, 4.1)),
        )
        for number in range(num_pools)
    )
    free, offers = {pool.name: pool.num_gpus for pool in made}, []
    for number in range(num_jobs):
        home = dice.choice([*free, ""])
        tables = {name: {s: dice.uniform(1, 9) * 1e14 * s**0.8 for s in range(1, 9) if dice.random() < 0.6} for name in free}
        held = dice.choice([0, *(size for size in tables.get(home, {}) if size <= free[home])])
        if home:
            free[home] -= held
        own = demand(
            f"job-{number}",
            tables.pop(home, {}),
            held,
            weight=dice.choice((0.5, 1.0)),
            faulted=bool(held) and dice.random() < 0.3,
        )
        offers.append(Offer(demand=own, pool=home, tenant=dice.choice(("x", "y")), elsewhere=tables))
    return Market(pools=made, offers=tuple(offers))


def brute_force(market: Market) -> float:
    expected_s, best = rebalancing.horizon_s(market), -math.inf
    choices = []
    for offer in market.offers:
        own: list[tuple[str, int, float]] = [("", 0, gain(offer.demand, 0, expected_s=expected_s))]
        for pool in market.pools:
            there = rebalancing.in_pool(market, offer, pool)
            sizes = there.throughput_flops if there else {}
            own += [(pool.name, size, gain(there, size, expected_s=expected_s)) for size in sizes if there]
        choices.append(own)
    for picked in itertools.product(*choices):
        gpus = {o.demand.job: size for o, (_, size, _) in zip(market.offers, picked, strict=True)}
        pool = {o.demand.job: name for o, (name, _, _) in zip(market.offers, picked, strict=True)}
        if not pools.excess(market, gpus, pool):
            best = max(best, math.fsum(flop for *_, flop in picked))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_rebalancing_equals_brute_force_with_budget_and_quota(seed: int) -> None:
    market = random_market(seed, num_jobs=3)
    for limited in (market, replace(market, budget_dollars_per_h=9.0, quotas_gpus={"x": 3})):
        plan = rebalance(limited)
        assert plan.gain == pytest.approx(brute_force(limited), rel=1e-7)
        assert plan.optimal
        assert not pools.excess(limited, plan.gpus, plan.pool)


@pytest.mark.parametrize("seed", range(5))
def test_pinned_pools_are_independent_knapsacks(seed: int) -> None:
    market = random_market(seed, num_jobs=5)
    plan = recover(market)
    alone = [
        allocate(
            Request(
                demands=tuple(o.demand for o in market.offers if o.pool == pool.name),
                num_gpus=pool.num_gpus,
                mtbf_gpu_s=pool.mtbf_gpu_s,
            ),
            timer=time.perf_counter,
        )
        for pool in market.pools
    ]
    assert plan.gpus == {o.demand.job: 0 for o in market.offers} | {job: n for each in alone for job, n in each.gpus.items()}
    assert plan.gain == pytest.approx(sum(each.gain for each in alone))
    assert plan.optimal


@pytest.mark.parametrize("seed", range(5))
def test_one_pool_is_the_knapsack_and_an_endless_budget_is_none(seed: int) -> None:
    market = random_market(seed, num_pools=1)
    pinned = replace(market, offers=tuple(replace(offer, pool="pool-0") for offer in market.offers))
    demands = tuple(offer.demand for offer in pinned.offers)
    alone = allocate(
        Request(demands=demands, num_gpus=market.pools[0].num_gpus, mtbf_gpu_s=market.pools[0].mtbf_gpu_s),
        timer=time.perf_counter,
    )
    assert rebalance(pinned).gain == pytest.approx(alone.gain, rel=1e-7)
    assert rebalance(replace(pinned, budget_dollars_per_h=1e12)).gain == pytest.approx(alone.gain, rel=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_more_is_never_worse_and_less_budget_never_better(seed: int) -> None:
    market = random_market(seed)
    poorer = [rebalance(replace(market, budget_dollars_per_h=budget)).gain for budget in (0.0, 5.0, 20.0, math.inf)]
    assert all(less <= more + 1e-6 * abs(more) for less, more in itertools.pairwise(poorer))


def test_a_job_moves_only_if_that_pays() -> None:
    here = Offer(demand=demand("gpt", line(1e14), 4), pool="a", elsewhere={"b": line(1e14, 4)})
    assert rebalance(Market(pools=(replace(A, num_gpus=4), B), offers=(here,))).pool == {"gpt": "a"}
    faster = replace(here, elsewhere={"b": line(2e14, 6)})
    assert rebalance(Market(pools=(replace(A, num_gpus=4), B), offers=(faster,))).pool == {"gpt": "b"}
    dear = replace(faster, demand=replace(here.demand, transition_s=1e6))
    assert rebalance(Market(pools=(replace(A, num_gpus=4), B), offers=(dear,))).pool == {"gpt": "a"}


def test_a_loose_gap_does_not_move_jobs_for_nothing() -> None:
    offers = tuple(
        Offer(demand=demand(f"job-{n}", {2: 2e14}, 2), pool=p, elsewhere={q: {2: 2e14}})
        for n, p, q in ((0, "a", "b"), (1, "a", "b"), (2, "b", "a"))
    )
    plan = rebalance(Market(pools=(A, B), offers=offers), rel_gap=0.5)
    assert plan.pool == {"job-0": "a", "job-1": "a", "job-2": "b"}
    assert plan.gpus == {"job-0": 2, "job-1": 2, "job-2": 2}


def test_spot_that_is_reclaimed_all_the_time_is_worth_less_than_it_seems() -> None:
    spot = Pool(name="spot", num_gpus=8, mtbf_gpu_s=1e5, dollars_per_gpu_h=1.0)
    job = Offer(demand=demand("gpt", {}, transition_s=3600.0), elsewhere={"a": {8: 1.0e15}, "spot": {8: 1.1e15}})
    assert rebalance(Market(pools=(A, spot), offers=(job,))).pool == {"gpt": "a"}
    steady = replace(spot, mtbf_gpu_s=1e6)
    assert rebalance(Market(pools=(A, steady), offers=(job,))).pool == {"gpt": "spot"}


def test_the_budget_chooses_the_cheaper_pool() -> None:
    job = Offer(demand=demand("gpt", {}), elsewhere={"a": {6: 2e15}, "b": {6: 1e15}})
    market = Market(pools=(A, B), offers=(job,))
    assert rebalance(market).pool == {"gpt": "a"}
    plan = rebalance(replace(market, budget_dollars_per_h=23.9))
    assert (plan.pool, plan.dollars_per_h) == ({"gpt": "b"}, 0.0)


def test_a_recovery_within_a_budget_does_not_grow_jobs() -> None:
    own = Offer(demand=demand("gpt", line(1e14), 4, faulted=True), pool="a", tenant="x")
    assert recover(Market(pools=(A,), offers=(own,))).gpus == {"gpt": 8}
    plan = recover(Market(pools=(A,), offers=(own,), budget_dollars_per_h=20.0))
    assert (plan.gpus, plan.method) == ({"gpt": 4}, "capped")
    assert "No job grows, since the budget is 20 dollars an hour, 32 would be spent" in plan.notes[0]
    assert plan.upper_bound >= plan.gain
    over = recover(Market(pools=(A,), offers=(own,), quotas_gpus={"x": 3}))
    assert "tenant x has a quota of 3 GPUs, 4 would be used" in over.notes[1]


def test_jobs_that_must_run_and_do_not_fit() -> None:
    big = Offer(demand=demand("gpt", {9: 1e15}, must_run=True), pool="a")
    with pytest.raises(NotEnoughGpus):
        recover(Market(pools=(A,), offers=(big,)))
    with pytest.raises(InfeasibleError, match="gpt must run, but no pool"):
        rebalance(Market(pools=(A,), offers=(big,)))
    some = Offer(demand=demand("gpt", {4: 1e15}, must_run=True), pool="a", tenant="x")
    with pytest.raises(InfeasibleError, match="budget and the quotas"):
        rebalance(Market(pools=(A,), offers=(some,), quotas_gpus={"x": 3}))


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("seed", range(3))
def test_without_time_the_answer_is_that_of_a_recovery_or_better_with_a_bound(seed: int) -> None:
    market = random_market(seed, num_jobs=8)
    plan = rebalance(market, time_limit_s=0.0)
    assert not pools.excess(market, plan.gpus, plan.pool)
    assert plan.upper_bound >= plan.gain
    assert plan.upper_bound >= rebalance(market).gain * (1 - 1e-9)


def test_no_jobs_and_no_gpus() -> None:
    assert rebalance(Market(pools=(A,), offers=())).gain == 0.0
    assert recover(Market(pools=(A,), offers=())).gpus == {}
    empty = replace(A, num_gpus=0)
    job = Offer(demand=demand("gpt", line(1e14), 0), pool="a")
    assert rebalance(Market(pools=(empty,), offers=(job,))).gpus == {"gpt": 0}


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_a_pool_refuses_what_is_no_price(price: float) -> None:
    with pytest.raises(UserError, match="pool p: dollars_per_gpu_h"):
        Pool(name="p", num_gpus=1, mtbf_gpu_s=1.0, dollars_per_gpu_h=price)
    with pytest.raises(UserError, match="mtbf_gpu_s"):
        Pool(name="p", num_gpus=1, mtbf_gpu_s=0.0)
