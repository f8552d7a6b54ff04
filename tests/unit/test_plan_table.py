"""The plan table: whatever it holds is what a fresh solve says, to the last GPU."""

import time
from dataclasses import replace

import pytest

from unicron_lib.errors import UserError
from unicron_lib.planning import instances, plan_table
from unicron_lib.planning.allocation import NotEnoughGpus, Request, allocate
from unicron_lib.planning.plan_table import Change, PlanTable
from unicron_lib.planning.waf import Demand

WAITING = Demand(job="waiting", throughput_flops={size: 1e15 * size**0.9 for size in range(2, 17)}, weight=2.0)


def build(request: Request, *queued: Demand, node_gpus: int = 8, residents: tuple[frozenset[str], ...] = ()) -> PlanTable:
    changes = plan_table.one_step(request, node_gpus=node_gpus, residents=residents, queued=queued)
    return plan_table.build(request, changes, queued=queued, timer=time.perf_counter)


def assert_equals_fresh_solves(table: PlanTable, changes: tuple[Change, ...]) -> int:
    """Compare every change; how many the table computed itself."""
    for change in changes:
        asked = plan_table.after(table.request, change, table.queued)
        found = table.lookup(change)
        try:
            fresh = allocate(asked, timer=time.perf_counter)
        except NotEnoughGpus:
            assert found is None
            assert change in table.infeasible
            continue
        assert found is not None
        assert found.optimal
        assert (found.gpus, found.gain, found.upper_bound) == (fresh.gpus, fresh.gain, fresh.upper_bound), change
    return sum(found.method == plan_table.METHOD for found in table.plans.values())


@pytest.mark.parametrize("seed", range(4))
def test_every_change_of_a_cluster_is_in_the_table_and_equals_a_fresh_solve(seed: int) -> None:
    request = instances.cluster(num_jobs=10, num_gpus=96, seed=seed)
    names = [demand.job for demand in request.demands if demand.current_gpus]
    residents = (frozenset(names[:2]), frozenset(names[1:4]))
    changes = plan_table.one_step(request, node_gpus=8, residents=residents, queued=(WAITING,))
    table = build(request, WAITING, residents=residents)
    assert set(table.plans) == set(changes)
    # the others are solved afresh, which is right, but a table of those would take seconds
    assert assert_equals_fresh_solves(table, changes) > 0.7 * len(changes)


@pytest.mark.parametrize("kind", sorted(instances.KINDS))
@pytest.mark.parametrize("seed", range(6))
def test_what_solvers_get_wrong_is_right_in_the_table(kind: str, seed: int) -> None:
    request = instances.odd(kind, seed=seed)
    table = build(request, WAITING, node_gpus=4)
    assert_equals_fresh_solves(table, plan_table.one_step(request, node_gpus=4, queued=(WAITING,)))


def test_jobs_that_are_alike_are_told_apart_as_a_fresh_solve_does() -> None:
    twins = tuple(Demand(job=f"twin-{n}", throughput_flops={4: 1e15, 8: 2e15, 12: 2.5e15}) for n in range(9))
    request = Request(demands=twins, num_gpus=44, mtbf_gpu_s=instances.MTBF_GPU_S)
    changes = plan_table.one_step(request, node_gpus=4)
    assert assert_equals_fresh_solves(build(request, node_gpus=4), changes) == len(changes)


def test_one_step_lists_each_change_once() -> None:
    running = Demand(job="a", throughput_flops={1: 1.0, 2: 2.0}, current_gpus=2, current_flops=2.0)
    queued = Demand(job="b", throughput_flops={1: 1.0})
    request = Request(demands=(running,), num_gpus=2, mtbf_gpu_s=1.0)
    hit = frozenset({"a"})
    assert set(plan_table.one_step(request, node_gpus=1, residents=(hit,), queued=(queued,))) == {
        Change(faulted=hit),
        Change(gpus=-1, faulted=hit),
        Change(gpus=-1),
        Change(gpus=1),
        Change(finished="a"),
        Change(launched="b"),
    }
    assert not any(change.gpus == -8 for change in plan_table.one_step(request, node_gpus=8))


def test_what_the_table_does_not_hold_is_solved_online() -> None:
    request = instances.cluster(num_jobs=4, num_gpus=32, seed=1)
    table = build(request)
    double_loss = Change(gpus=-16)
    assert table.lookup(double_loss) is None
    fresh = allocate(replace(request, num_gpus=16), timer=time.perf_counter)
    assert table.answer(double_loss, timer=time.perf_counter).gpus == fresh.gpus
    known = Change(gpus=-8)
    assert table.answer(known, timer=time.perf_counter) is table.lookup(known)


def test_changes_that_leave_too_little_are_kept_apart() -> None:
    must = Demand(job="a", throughput_flops={8: 1e15}, current_gpus=8, current_flops=1e15, must_run=True)
    table = build(Request(demands=(must,), num_gpus=8, mtbf_gpu_s=1e6))
    assert Change(gpus=-8, faulted=frozenset({"a"})) in table.infeasible
    with pytest.raises(NotEnoughGpus):
        table.answer(Change(gpus=-8), timer=time.perf_counter)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (Change(faulted=frozenset({"x"})), "x is none of the jobs: a"),
        (Change(finished="x"), "x is none of the jobs: a"),
        (Change(launched="x"), "x is none of the queued jobs: there are none"),
        (Change(gpus=-9), "9 GPUs cannot be lost, there are only 8"),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(change: Change, sentence: str) -> None:
    request = Request(demands=(Demand(job="a", throughput_flops={1: 1.0}),), num_gpus=8, mtbf_gpu_s=1.0)
    with pytest.raises(UserError, match=sentence):
        plan_table.after(request, change)
