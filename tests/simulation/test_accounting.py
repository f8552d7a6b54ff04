"""The accounts add up: every GPU-second has one use, every loss one cause, and a journal gives what the run gave."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import CLUSTER, JOBS, Fixed, fault, job, trace

from unicron_lib.domain.failures import ErrorKind
from unicron_lib.simulation.accounting import Books, books, curve, of_outcome
from unicron_lib.simulation.durations import Detection
from unicron_lib.simulation.engine import Outcome, simulate
from unicron_lib.simulation.generators import trace_a, trace_b
from unicron_lib.simulation.journal_segments import of_journal
from unicron_lib.simulation.ledger import Segment
from unicron_lib.simulation.unicron import Unicron, UnicronRun
from unicron_lib.simulation.uses import NOT_BADPUT, Use

HANG, ECC = ErrorKind.TASK_HANG, ErrorKind.ECC_ERROR
WEIGHTS = {job.job: job.weight for job in JOBS}
FEW = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def segment(name: str, from_s: float, until_s: float, flops: float, use: Use = Use.TRAINING, cause: str = "") -> Segment:
    return Segment(job=name, gpus=8, from_s=from_s, until_s=until_s, flops=flops, use=use, cause=cause)


def test_there_are_fourteen_types_of_badput() -> None:
    assert len(set(Use) - NOT_BADPUT) == 14


def test_a_fault_is_charged_with_what_it_costs() -> None:
    """Job a, of weight 2, stands for 100 s on 8 GPUs that make 8 TFLOP/s, at 2 dollars an hour each."""
    found = of_outcome(simulate(Fixed(), trace(fault(1000.0, HANG)), CLUSTER, JOBS))
    (cause,) = [name for name in found.losses if name]
    loss = found.losses[cause]
    assert loss.gpu_s == pytest.approx(800.0)
    assert loss.waf_flop == pytest.approx(2.0 * 8e12 * 100.0)
    assert loss.dollars == pytest.approx(800.0 / 3600.0 * 2.0)
    account = found.jobs["a"]
    assert account.ettr == pytest.approx(0.99)
    assert account.goodput == pytest.approx(0.99)
    assert found.jobs["b"].ettr == 1.0


def test_a_broken_node_is_charged_with_its_repair() -> None:
    found = of_outcome(simulate(Fixed(), trace(fault(1000.0, ECC, repair_s=500.0)), CLUSTER, JOBS))
    (cause,) = [name for name in found.losses if name]
    assert found.losses[cause].gpu_s == pytest.approx(8 * 500.0)
    assert found.losses[cause].waf_flop == pytest.approx(2.0 * 8e12 * 500.0)
    assert found.cluster.gpu_s[Use.OUT_OF_USE] == pytest.approx(8 * 500.0)


def test_what_nobody_holds_is_idle() -> None:
    found = of_outcome(simulate(Fixed(), trace(), CLUSTER, JOBS))
    assert found.cluster.gpu_s[Use.IDLE] == pytest.approx(16 * 10_000.0)
    assert found.cluster.goodput == pytest.approx(0.5)
    assert found.cluster.ettr == pytest.approx(0.5)


def test_a_smaller_job_is_charged_to_what_made_it_smaller() -> None:
    told = [segment("a", 0.0, 10.0, 8.0), segment("a", 10.0, 30.0, 5.0, cause="f"), segment("a", 30.0, 40.0, 8.0)]
    found = books(told, weights={"a": 2.0}, capacity_gpu_s=8 * 40.0, duration_s=40.0, gpu_dollars_h=1.0)
    assert found.losses["f"].waf_flop == pytest.approx(2.0 * 3.0 * 20.0)
    assert found.losses["f"].gpu_s == 0.0
    assert found.losses[""].waf_flop == 0.0


def test_a_larger_job_is_a_gain_of_the_fault() -> None:
    told = [segment("a", 0.0, 10.0, 8.0), segment("a", 10.0, 20.0, 9.0, cause="f")]
    found = books(told, weights={"a": 1.0}, capacity_gpu_s=160.0, duration_s=20.0, gpu_dollars_h=1.0)
    assert found.losses["f"].waf_flop == pytest.approx(-10.0)


def check(found: Outcome) -> Books:
    """What must hold of the accounts of any run."""
    made = of_outcome(found)
    assert made.cluster.total_gpu_s == pytest.approx(found.cluster.num_gpus * found.duration_s)
    assert made.accumulated_waf == pytest.approx(sum(account.waf_flop for account in made.jobs.values()))
    lost = sum(v for use, v in made.cluster.gpu_s.items() if use not in {Use.TRAINING, Use.IDLE})
    assert sum(loss.gpu_s for loss in made.losses.values()) == pytest.approx(lost)
    assert {cause for cause in made.losses if cause} <= set(found.faults)
    weights = {job.job: job.weight for job in found.jobs}
    steps = [*curve(found.segments, weights), (found.duration_s, 0.0)]
    area = sum(level * (after - at_s) for (at_s, level), (after, _) in pairwise(steps))
    assert area == pytest.approx(made.accumulated_waf, rel=1e-6)
    for account in made.jobs.values():
        assert 0.0 <= account.ettr <= 1.0
    return made


@FEW
@given(st.integers(0, 10**6), st.sampled_from([trace_a, trace_b]))
def test_the_accounts_of_any_run_add_up(seed: int, made: object) -> None:
    found = simulate(Unicron(), made(seed, num_nodes=8), replace(CLUSTER, num_nodes=8), [*JOBS, job("c")])
    assert found.faults
    check(found)


@FEW
@given(st.integers(0, 10**6))
def test_losses_explain_all_that_was_not_earned(seed: int) -> None:
    """What the jobs would have earned at their first speeds is what they earned and what the causes took."""
    found = simulate(Unicron(), trace_b(seed, num_nodes=4), CLUSTER, JOBS)
    made = check(found)
    speeds = {job.job: job.flops(24 if job.job == "a" else 8) for job in JOBS}
    full = sum(WEIGHTS[name] * speeds[name] * found.duration_s for name in speeds)
    assert made.accumulated_waf + sum(loss.waf_flop for loss in made.losses.values()) == pytest.approx(full)
    assert made.losses[""].waf_flop == pytest.approx(0.0, abs=1e-6 * full)


class Watched(Unicron):
    """Keeps its run, whose journal is that of a production cluster."""

    runs: list[UnicronRun] = []  # noqa: RUF012

    def start(self, cluster: object, jobs: object) -> UnicronRun:
        self.runs.append(super().start(cluster, jobs))
        return self.runs[-1]


@pytest.mark.parametrize("made", [trace_a, trace_b])
def test_a_journal_gives_the_accounts_of_the_run(made: object) -> None:
    """Detection takes no time here: a journal knows when a failure was seen, not when it began."""
    at_once = Detection(node_health_s=0.0, process_s=0.0, exception_s=0.0, statistics_iterations=0.0)
    policy = Watched(detection=at_once, keeps_journal=True)
    found = simulate(policy, made(3, num_nodes=4), CLUSTER, JOBS)
    run, told = of_outcome(found), of_journal(policy.runs[-1].production.journal, end_s=found.duration_s)
    assert found.faults
    assert told.accumulated_waf == pytest.approx(run.accumulated_waf, rel=1e-3)
    assert told.cluster.total_gpu_s == pytest.approx(run.cluster.total_gpu_s)
    for use in (Use.TRAINING, Use.OUT_OF_USE):
        assert told.cluster.gpu_s[use] == pytest.approx(run.cluster.gpu_s[use], rel=1e-3)
    lost = sum(loss.waf_flop for cause, loss in run.losses.items() if cause)
    assert sum(loss.waf_flop for cause, loss in told.losses.items() if cause) == pytest.approx(lost, rel=0.02)


def test_an_empty_journal_has_empty_accounts() -> None:
    found = of_journal([], end_s=1000.0)
    assert (found.accumulated_waf, found.cluster.goodput, found.cluster.ettr) == (0.0, 0.0, 0.0)
