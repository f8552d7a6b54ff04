"""The allocation against an oracle that tries everything, and against what must hold for any optimum."""

import math
import random
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from unicron_lib.planning import knapsack
from unicron_lib.planning.allocation import Allocation, NotEnoughGpus, Request, allocate
from unicron_lib.planning.knapsack import Options
from unicron_lib.planning.waf import Demand, gain, running_s

settings.register_profile("solver", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
SOLVER = settings.get_profile("solver")

FLOPS = st.one_of(st.sampled_from([0.0, 1e12, 2e12, 3e12]), st.floats(1e9, 1e15))


@st.composite
def demands(draw: st.DrawFn, name: str, largest: int = 8) -> Demand:
    sizes = draw(st.lists(st.integers(1, largest), min_size=1, max_size=5, unique=True))
    table = {size: draw(FLOPS) for size in sizes}
    current = draw(st.sampled_from([0, 0, *sizes]))
    return Demand(
        job=name,
        throughput_flops=table,
        weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
        current_gpus=current,
        current_flops=table.get(current, 0.0),
        faulted=draw(st.booleans()),
        must_run=draw(st.sampled_from([False, False, False, True])),
        transition_s=draw(st.sampled_from([0.0, 120.0, 1e7])),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    jobs = tuple(draw(demands(f"job-{i}")) for i in range(draw(st.integers(1, 4))))
    return Request(demands=jobs, num_gpus=draw(st.integers(0, 16)), mtbf_gpu_s=draw(st.sampled_from([1e3, 6.2e7])))


def solve(request: Request, time_limit_s: float = 10.0) -> Allocation:
    return allocate(request, timer=time.perf_counter, time_limit_s=time_limit_s)


def oracle(request: Request) -> float | None:
    """The greatest gain of all allocations that fit, None if none does."""
    expected_s = running_s(request.mtbf_gpu_s, request.num_gpus)
    every = product(*(demand.sizes(request.num_gpus) for demand in request.demands))
    sums = (
        math.fsum(gain(demand, size, expected_s=expected_s) for demand, size in zip(request.demands, choice, strict=True))
        for choice in every
        if sum(choice) <= request.num_gpus
    )
    return max(sums, default=None)


def scale(request: Request) -> float:
    """The greatest figure in the objective: what rounding is relative to."""
    expected_s = running_s(request.mtbf_gpu_s, request.num_gpus)
    terms = [d.weight * d.current_flops * d.transition_s for d in request.demands]
    terms += [d.weight * max(d.throughput_flops.values()) * expected_s for d in request.demands]
    return max(terms)


@given(request=requests())
@settings(SOLVER)
def test_the_gain_is_the_greatest_of_all_that_fit(request: Request) -> None:
    best = oracle(request)
    if best is None:
        with pytest.raises(NotEnoughGpus) as refused:
            solve(request)
        assert refused.value.required > refused.value.available == request.num_gpus
        return
    found = solve(request)
    assert sum(found.gpus.values()) <= request.num_gpus
    assert all(found.gpus[demand.job] in {0, *demand.throughput_flops} for demand in request.demands)
    assert found.optimal
    assert found.gap == 0.0
    assert found.upper_bound == found.gain
    assert found.gain == pytest.approx(best, rel=1e-12, abs=1e-8 * scale(request))


@given(request=requests())
@settings(SOLVER)
def test_without_time_there_is_still_a_plan_with_a_true_bound(request: Request) -> None:
    best = oracle(request)
    assume(best is not None)
    found = solve(request, time_limit_s=0.0)
    slack = 1e-8 * scale(request)
    assert sum(found.gpus.values()) <= request.num_gpus
    assert found.gain <= best + slack
    assert found.upper_bound >= best - slack
    assert found.upper_bound >= found.gain
    assert found.gap >= 0.0
    if found.optimal:
        assert found.gain == pytest.approx(best, rel=1e-12, abs=slack)


@given(request=requests(), seed=st.integers(0, 1000))
@settings(SOLVER, max_examples=30)
def test_the_order_of_jobs_does_not_matter(request: Request, seed: int) -> None:
    assume(oracle(request) is not None)
    shuffled = random.Random(seed).sample(request.demands, len(request.demands))
    assert solve(request).gpus == solve(replace(request, demands=tuple(shuffled))).gpus


@given(request=requests())
@settings(SOLVER, max_examples=30)
def test_doubling_every_weight_changes_nothing_but_the_gain(request: Request) -> None:
    assume(oracle(request) is not None)
    doubled = replace(request, demands=tuple(replace(d, weight=2 * d.weight) for d in request.demands))
    before, after = solve(request), solve(doubled)
    assert after.gpus == before.gpus
    assert after.gain == pytest.approx(2 * before.gain)


@given(request=requests())
@settings(SOLVER, max_examples=30)
def test_when_moving_costs_more_than_it_can_bring_nobody_moves(request: Request) -> None:
    dear = tuple(
        replace(d, faulted=False, must_run=False, transition_s=1e12, current_flops=1e15)
        for d in request.demands
        if d.current_gpus
    )
    held = sum(demand.current_gpus for demand in dear)
    assume(held)
    found = solve(replace(request, demands=dear, num_gpus=held))
    assert found.gpus == {demand.job: demand.current_gpus for demand in dear}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Options, ...]:
    made = []
    for _ in range(draw(st.integers(1, 4))):
        counts = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=6)))
        gains = draw(st.lists(st.integers(-20, 20), min_size=len(counts), max_size=len(counts)))
        array = np.array(gains, dtype=np.int64)
        made.append(Options(counts=np.array(counts, dtype=np.int64), gains=array, values=array))
    return tuple(made)


def brute(options: tuple[Options, ...], capacity: int) -> int:
    every = product(*(zip(table.counts.tolist(), table.gains.tolist(), strict=True) for table in options))
    return max(sum(g for _, g in choice) for choice in every if sum(k for k, _ in choice) <= capacity)


def fits(options: tuple[Options, ...], capacity: int) -> bool:
    return sum(int(table.counts[0]) for table in options) <= capacity


@given(options=tables(), capacity=st.integers(0, 40))
@settings(max_examples=300)
def test_the_dynamic_programme_equals_brute_force(options: tuple[Options, ...], capacity: int) -> None:
    assume(fits(options, capacity))
    found = knapsack.best(options, capacity)
    assert sum(found) <= capacity
    assert knapsack.total_gain(options, found) == brute(options, capacity)


@given(options=tables(), capacity=st.integers(0, 40))
@settings(max_examples=300)
def test_the_relaxation_bounds_and_its_allocation_fits(options: tuple[Options, ...], capacity: int) -> None:
    assume(fits(options, capacity))
    pruned = tuple(knapsack.undominated(table) for table in options)
    relaxed = knapsack.relax(pruned, capacity)
    best = brute(options, capacity)
    assert relaxed.lower <= best <= relaxed.upper + knapsack.ROUNDING
    assert sum(relaxed.counts) <= capacity
    assert relaxed.lower == knapsack.total_gain(pruned, relaxed.counts)
    # it is the LP's own optimum: only one segment is bought in part
    assert relaxed.upper - relaxed.lower <= max(int(table.gains[-1] - table.gains[0]) for table in pruned) + knapsack.ROUNDING


@given(options=tables(), capacity=st.integers(0, 40))
@settings(max_examples=300)
def test_what_is_dropped_was_no_part_of_an_optimum(options: tuple[Options, ...], capacity: int) -> None:
    assume(fits(options, capacity))
    pruned = tuple(knapsack.undominated(table) for table in options)
    relaxed = knapsack.relax(pruned, capacity)
    for lower in (relaxed.lower, brute(options, capacity)):
        core = knapsack.contenders(pruned, relaxed, lower)
        assert knapsack.total_gain(core, knapsack.best(core, capacity)) == brute(options, capacity)


@given(options=tables(), capacity=st.integers(0, 39))
def test_one_more_gpu_never_costs(options: tuple[Options, ...], capacity: int) -> None:
    assume(fits(options, capacity))
    fewer, more = (knapsack.total_gain(options, knapsack.best(options, n)) for n in (capacity, capacity + 1))
    assert fewer <= more


def test_an_option_worth_no_more_than_a_smaller_one_is_dropped() -> None:
    gains = np.array([0, 5, 3, 4, 5, 6], dtype=np.int64)
    kept = knapsack.undominated(Options(counts=np.arange(6, dtype=np.int64), gains=gains, values=gains))
    assert kept.counts.tolist() == [0, 1, 5]
