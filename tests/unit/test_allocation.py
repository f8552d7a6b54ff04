"""Ties, fallbacks and time-outs of the allocation."""

import itertools
import time
from collections.abc import Sequence

import pytest

from unicron_lib.errors import UserError
from unicron_lib.planning import milp
from unicron_lib.planning.allocation import Allocation, NotEnoughGpus, Request, allocate
from unicron_lib.planning.knapsack import Options
from unicron_lib.planning.waf import Demand, gain, running_s

MTBF_GPU_S = 6.2e7


def demand(job: str, table: dict[int, float], **more: object) -> Demand:
    return Demand(job=job, throughput_flops=table, **more)  # type: ignore[arg-type]


def solve(*demands: Demand, num_gpus: int, **more: object) -> Allocation:
    request = Request(demands=demands, num_gpus=num_gpus, mtbf_gpu_s=MTBF_GPU_S)
    return allocate(request, timer=time.perf_counter, **more)  # type: ignore[arg-type]


class FakeSolver:
    """Answers what it is told to, and counts the questions."""

    def __init__(self, solution: milp.Solution) -> None:
        self.solution = solution
        self.calls = 0

    def __call__(self, tables: Sequence[Options], capacity: int, *, time_limit_s: float) -> milp.Solution:
        self.calls += 1
        return self.solution


def dead(status: str) -> FakeSolver:
    return FakeSolver(milp.Solution(counts=None, proved=False, status=status))


def lying(*counts: int) -> FakeSolver:
    return FakeSolver(milp.Solution(counts=counts, proved=True, status="optimal"))


TIGHT = (demand("a", {3: 3.1e12, 5: 5.0e12}), demand("b", {2: 2.0e12, 4: 3.9e12}), demand("c", {3: 3.05e12}))
"""On 8 GPUs the best is 3 + 2 + 3, and several others come close."""


def test_the_objective_is_the_papers() -> None:
    moved = demand("a", {8: 3.0, 16: 5.0}, weight=2.0, current_gpus=8, current_flops=3.0, transition_s=10.0)
    assert running_s(6400.0, 64) == 100.0
    assert gain(moved, 16, expected_s=100.0) == 2.0 * 5.0 * 100.0 - 2.0 * 3.0 * 10.0
    assert gain(moved, 8, expected_s=100.0) == 2.0 * 3.0 * 100.0
    assert gain(moved, 0, expected_s=100.0) == -2.0 * 3.0 * 10.0
    hurt = demand("a", {8: 3.0}, weight=2.0, current_gpus=8, current_flops=3.0, transition_s=10.0, faulted=True)
    assert gain(hurt, 8, expected_s=100.0) == 2.0 * 3.0 * 100.0 - 2.0 * 3.0 * 10.0
    assert gain(demand("new", {8: 3.0}, transition_s=10.0), 8, expected_s=100.0) == 300.0


def test_among_equals_the_job_that_runs_stays() -> None:
    table = {2: 2e12, 4: 3e12}
    running = demand("b", table, current_gpus=4, current_flops=3e12)
    assert solve(demand("a", table), running, num_gpus=6).gpus == {"a": 2, "b": 4}


def test_among_equals_fewer_gpus_and_then_the_order_of_names() -> None:
    assert solve(demand("a", {2: 2e12, 4: 2e12}), num_gpus=8).gpus == {"a": 2}
    table = {2: 2e12, 4: 3e12}
    assert solve(demand("b", table), demand("a", table), num_gpus=6).gpus == {"a": 4, "b": 2}


def test_more_gpus_are_not_always_better() -> None:
    found = solve(demand("a", {7: 7e12, 8: 5e12}), num_gpus=8)
    assert found.gpus == {"a": 7}
    assert found.optimal


def test_must_run_keeps_a_poor_job_alive() -> None:
    rich, poor = demand("rich", {6: 6e15, 8: 9e15}), demand("poor", {2: 1e9}, must_run=True)
    assert solve(rich, poor, num_gpus=8).gpus == {"rich": 6, "poor": 2}


def test_what_must_run_and_does_not_fit_is_told_with_figures() -> None:
    jobs = (demand("a", {6: 1e12}, must_run=True), demand("b", {4: 1e12}, must_run=True), demand("c", {2: 1e12}))
    with pytest.raises(NotEnoughGpus, match=r"need 10 GPUs \(a at least 6, b at least 4\), only 8 can be used") as refused:
        solve(*jobs, num_gpus=8)
    assert (refused.value.required, refused.value.available) == (10, 8)
    with pytest.raises(NotEnoughGpus, match="a must run, but there is no number of GPUs"):
        solve(demand("a", {}, must_run=True), num_gpus=8)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_nothing_to_share_is_shared(num_gpus: int) -> None:
    found = solve(demand("a", {2: 1e12}, current_gpus=2, current_flops=1e12, transition_s=5.0), num_gpus=num_gpus)
    assert found.gpus == {"a": 0}
    assert found.gain == -5e12
    assert found.optimal
    assert solve(num_gpus=num_gpus).gpus == {}


@pytest.mark.parametrize("status", ["SolverError: HIGHS failed", "user_limit", "ValueError: Cannot unpack invalid solution"])
def test_a_solver_that_fails_is_replaced(status: str) -> None:
    solver = dead(status)
    found = solve(*TIGHT, num_gpus=8, solve=solver)
    assert solver.calls == 1
    assert (found.gpus, found.optimal, found.method) == ({"a": 3, "b": 2, "c": 3}, True, "dp")
    assert status in found.reason


def test_a_solver_that_lies_is_found_out() -> None:
    solver = lying(5, 0, 3)
    found = solve(*TIGHT, num_gpus=8, solve=solver)
    assert solver.calls == 1
    assert (found.gpus, found.optimal, found.method) == ({"a": 3, "b": 2, "c": 3}, True, "dp")


def test_without_time_the_solver_is_not_asked() -> None:
    solver = dead("never")
    jobs = (demand("a", {5: 5e12}), demand("b", {4: 3.9e12}), demand("c", {4: 3.9e12}))
    found = solve(*jobs, num_gpus=8, time_limit_s=0.0, solve=solver)
    assert solver.calls == 0
    assert (found.gpus, found.optimal, found.method) == ({"a": 5, "b": 0, "c": 0}, False, "greedy")
    assert found.upper_bound > found.gain
    assert 0 < found.gap < 1


def test_a_time_out_on_a_large_model_still_gives_a_plan_with_its_gap() -> None:
    clock = itertools.count(0.0, 1000.0)
    sizes = range(1, 4001)
    jobs = [demand(f"job-{i}", {k: 1e12 * (k + (k * k * (i + 3)) % 97) for k in sizes}) for i in range(8)]
    request = Request(demands=tuple(jobs), num_gpus=20_011, mtbf_gpu_s=MTBF_GPU_S)
    found = allocate(request, timer=lambda: next(clock), time_limit_s=1.0, solve=dead("user_limit"))
    assert sum(found.gpus.values()) <= 20_011
    assert found.upper_bound >= found.gain > 0
    assert 0 <= found.gap < 0.01


@pytest.mark.parametrize("flops", [float("nan"), float("inf"), -1.0])
def test_a_throughput_that_is_no_throughput_names_the_job(flops: float) -> None:
    with pytest.raises(UserError, match="job gpt-a: throughput_flops of 4 GPUs is"):
        demand("gpt-a", {4: flops})


def test_many_jobs_on_many_gpus_leave_digits_for_ties() -> None:
    jobs = [demand(f"job-{i:04}", {4: 1e12, 8: 2e12}) for i in range(600)]
    found = solve(*jobs, num_gpus=100_000)
    assert found.gpus == {job.job: 8 for job in jobs}
    assert found.optimal
