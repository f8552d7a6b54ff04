"""A thousand random clusters against the dynamic programme and the policies that people use: `make storm`."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from unicron_lib.cli.planner_figures import by_dynamic_programme
from unicron_lib.planning import instances, plan_table
from unicron_lib.planning.allocation import Allocation, NotEnoughGpus, Request, allocate
from unicron_lib.planning.waf import Demand, gain, running_s, waf_flops

NUM_CLUSTERS = 1000
KINDS = (*instances.KINDS, "realistic")


def cluster(seed: int) -> Request:
    """Number `seed` of the thousand: the kinds take turns."""
    kind = KINDS[seed % len(KINDS)]
    if kind == "realistic":
        return instances.cluster(num_jobs=1 + seed % 24, num_gpus=8 + seed % 120, seed=seed)
    return instances.odd(kind, seed=seed)


def solve(request: Request) -> Allocation | None:
    try:
        return allocate(request, timer=time.perf_counter)
    except NotEnoughGpus:
        return None


def reference(request: Request) -> dict[str, int] | None:
    """The dynamic programme over all options; None if the jobs that must run do not fit."""
    required = sum(demand.min_gpus for demand in request.demands if demand.must_run)
    return by_dynamic_programme(request) if required <= request.num_gpus else None


def shares(request: Request, share: Callable[[Demand], float]) -> Mapping[str, int]:
    """Each job's part of the GPUs, rounded down to a size that it can run on."""
    total = math.fsum(share(demand) for demand in request.demands)
    parts = {demand.job: int(request.num_gpus * share(demand) / total) for demand in request.demands}
    return {d.job: max((size for size in d.throughput_flops if size <= parts[d.job]), default=0) for d in request.demands}


POLICIES: Mapping[str, Callable[[Demand], float]] = {
    "equally": lambda _: 1.0,
    "weighted": lambda demand: demand.weight,
    "sized": lambda demand: float(demand.min_gpus),
}


@pytest.mark.storm
def test_a_thousand_clusters_equal_the_dynamic_programme() -> None:
    methods = set()
    infeasible = 0
    for seed in range(NUM_CLUSTERS):
        request = cluster(seed)
        found, expected = solve(request), reference(request)
        assert (found and found.gpus) == expected, seed
        infeasible += found is None
        assert found is None or (found.optimal and found.gap == 0.0), seed
        methods |= {found.method} if found else set()
    assert {"milp", "bound"} <= methods
    assert NUM_CLUSTERS / 20 < infeasible < NUM_CLUSTERS / 4


@pytest.mark.storm
@pytest.mark.parametrize("moves_are_free", [True, False])
def test_the_plan_is_never_worth_less_than_the_usual_policies(moves_are_free: bool) -> None:  # noqa: FBT001
    compared = 0
    for seed in range(NUM_CLUSTERS):
        request = cluster(seed)
        free = tuple(
            replace(d, must_run=False, transition_s=0.0 if moves_are_free else d.transition_s) for d in request.demands
        )
        request = replace(request, demands=free)
        found = solve(request)
        assert found is not None
        expected_s = running_s(request.mtbf_gpu_s, request.num_gpus)
        for name, share in POLICIES.items():
            theirs = shares(request, share)
            compared += 1
            if moves_are_free:
                ours, other = (math.fsum(waf_flops(d, gpus[d.job]) for d in free) for gpus in (found.gpus, theirs))
            else:
                ours, other = found.gain, math.fsum(gain(d, theirs[d.job], expected_s=expected_s) for d in free)
            assert ours >= other - 1e-8 * abs(other), (seed, name)
    assert compared == len(POLICIES) * NUM_CLUSTERS


@pytest.mark.storm
def test_the_plan_tables_of_a_hundred_clusters_equal_fresh_solves() -> None:
    for seed in range(0, NUM_CLUSTERS, 10):
        request = cluster(seed + seed // 10 % len(KINDS))
        changes = plan_table.one_step(request, node_gpus=4)
        table = plan_table.build(request, changes, timer=time.perf_counter)
        for change in changes:
            fresh, found = solve(plan_table.after(request, change)), table.lookup(change)
            assert (fresh and fresh.gpus) == (found and found.gpus), (seed, change)
