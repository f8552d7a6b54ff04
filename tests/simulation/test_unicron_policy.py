"""Unicron in the simulator: the production code answers each fault, and takes as long as its durations say."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated import CLUSTER, JOBS, fault, job, trace

from unicron_lib.domain.cluster import ClusterState, Node
from unicron_lib.domain.events import FailureDetected, NodeSuspected, PlanDecided
from unicron_lib.domain.failures import DEFAULT_SEVERITY, DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec, JobState
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.domain.plans import Assignment, Layout, Plan, PlanKind, Slot
from unicron_lib.simulation import durations
from unicron_lib.simulation.ablations import ABLATIONS, without_detection, without_multi_job, without_nearest_principle
from unicron_lib.simulation.accounting import of_outcome
from unicron_lib.simulation.durations import Transition, detection_s, method_of, told_as
from unicron_lib.simulation.engine import Outcome, simulate
from unicron_lib.simulation.faults import Trace
from unicron_lib.simulation.fleet import Fleet
from unicron_lib.simulation.generators import FIGURE_1, Episode, Hazard, Repair, generated, trace_a, trace_b
from unicron_lib.simulation.invariants import broken
from unicron_lib.simulation.ledger import Segment
from unicron_lib.simulation.policy import Policy
from unicron_lib.simulation.unicron import Unicron, node_name
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster

K = ErrorKind
ALL_KINDS = dict.fromkeys(ErrorKind, 1.0)
STORM = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def of(found: Outcome, name: str) -> list[Segment]:
    return sorted((s for s in found.segments if s.job == name), key=lambda s: s.from_s)


def trained(found: Outcome, name: str) -> list[tuple[float, int]]:
    """From when on the job trained, on how many GPUs."""
    return [(segment.from_s, segment.gpus) for segment in of(found, name) if segment.use is Use.TRAINING]


def nodes_of(policy: Unicron, name: str) -> list[int]:
    """The numbers of the nodes that the job begins on."""
    run = policy.start(CLUSTER, JOBS)
    list(run.begin())
    return sorted({int(slot.node.removeprefix("node-")) for slot in run.first_slots[name]})


NODE_OF_A = nodes_of(Unicron(), "a")[0]


def test_all_begin_with_the_best_share() -> None:
    found = simulate(Unicron(), trace(), CLUSTER, JOBS)
    assert trained(found, "a") == [(0.0, 24)]
    assert trained(found, "b") == [(0.0, 8)]


def test_a_transient_fault_is_tried_again_in_place_and_touches_nobody_else() -> None:
    struck = fault(1000.0, K.NETWORK_ERROR, NODE_OF_A)
    found = simulate(Unicron(), trace(struck), CLUSTER, JOBS)
    took_s = detection_s(K.NETWORK_ERROR, 10.0) + 1.0 + Transition().in_place_s  # it may be an echo: a second of grace
    assert trained(found, "a") == [(0.0, 24), (pytest.approx(1000.0 + took_s), 24)]
    assert trained(found, "b") == [(0.0, 8)]
    assert {segment.cause for segment in of(found, "a")} == {"", *found.faults}


def test_a_hang_is_seen_after_three_iterations() -> None:
    found = simulate(Unicron(), trace(fault(1000.0, K.TASK_HANG, NODE_OF_A)), CLUSTER, JOBS)
    stood = of(found, "a")[1]
    assert stood.use is Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
    assert stood.duration_s == pytest.approx(3 * 10.0)


def test_a_broken_node_is_given_up_for_the_more_valuable_job_and_taken_back() -> None:
    """24 GPUs are left: the job of weight 2 keeps them all, the other one waits for the repair."""
    found = simulate(Unicron(), trace(fault(1000.0, K.ECC_ERROR, NODE_OF_A, repair_s=2000.0)), CLUSTER, JOBS)
    assert [gpus for _, gpus in trained(found, "a")] == [24, 24]
    assert trained(found, "a")[-1][0] < 1030.0
    assert [gpus for _, gpus in trained(found, "b")] == [8, 8]
    assert trained(found, "b")[-1][0] == pytest.approx(3000.0 + 1.0, abs=30.0)
    (cause,) = found.faults
    assert {segment.cause for segment in of(found, "b") if segment.gpus == 0} == {cause}


def test_without_multi_job_each_keeps_its_own() -> None:
    struck = trace(fault(1000.0, K.ECC_ERROR, NODE_OF_A, repair_s=2000.0))
    found = simulate(without_multi_job(), struck, CLUSTER, JOBS)
    assert [gpus for _, gpus in trained(found, "a")] == [24, 16, 24]
    assert trained(found, "b") == [(0.0, 8)]
    together = simulate(Unicron(), struck, CLUSTER, JOBS)
    assert of_outcome(together).accumulated_waf > of_outcome(found).accumulated_waf


def test_a_second_fault_during_the_answer_to_the_first_is_answered_too() -> None:
    two = trace(fault(1000.0, K.CUDA_ERROR, NODE_OF_A), fault(1005.0, K.ECC_ERROR, NODE_OF_A, repair_s=500.0))
    policy = Unicron(keeps_journal=True)
    run = policy.start(CLUSTER, JOBS)
    found = simulate(replace_run(policy, run), two, CLUSTER, JOBS)
    decided = [event for event in run.production.journal if isinstance(event, PlanDecided)]
    assert [event.plan.kind for event in decided[1:3]] == [PlanKind.RESTART, PlanKind.REALLOCATE]
    assert decided[2].supersedes == decided[1].plan.id
    assert trained(found, "a")[-1][1] == 24


def replace_run(policy: Unicron, run: object) -> Policy:
    """The policy, with a run that the test can look into."""

    class Known:
        name, fitted = policy.name, policy.fitted

        def start(self, _: object, __: object) -> object:
            return run

    return Known()


def test_a_fault_where_no_rank_is_goes_unnoticed() -> None:
    found = simulate(Unicron(), trace(fault(10.0, K.TASK_HANG, 3)), CLUSTER, [job("a", sizes=(8,))])
    assert len(found.faults) == 1
    assert trained(found, "a") == [(0.0, 8)]


def test_jobs_come_and_go() -> None:
    """A job that ends makes room for one that waits, and one that arrives takes what it is worth."""
    jobs = [
        job("a", work_flop=24e12 * 1000.0, sizes=(24,), weight=2.0),
        job("b", sizes=(16,)),
        job("c", arrives_s=500.0, sizes=(8,)),
    ]
    found = simulate(Unicron(), trace(), CLUSTER, jobs)
    assert trained(found, "a") == [(0.0, 24)]
    assert of(found, "a")[-1].until_s == pytest.approx(1000.0)
    assert trained(found, "c")[0][0] == pytest.approx(501.0, abs=30.0)
    assert trained(found, "b")[0][0] == pytest.approx(1001.0, abs=30.0)


def test_a_preempted_node_is_lost_for_production() -> None:
    found = simulate(Unicron(), trace(fault(100.0, K.PREEMPTED, NODE_OF_A, repair_s=300.0)), CLUSTER, JOBS)
    assert len(found.faults) == 1
    assert trained(found, "a")[-1][0] < 140.0


def test_production_in_virtual_time_empties_a_node_that_leaves_and_does_not_miss_it() -> None:
    run = Unicron().start(CLUSTER, JOBS)
    list(run.begin())
    production, node = run.production, node_name(NODE_OF_A)
    its = {"node": node, "boot": production.state.nodes[node].boot}
    production.tell(LeaveAnnounced(id="leave", at=100.0, reason="a spot notice", leaves_at=220.0, **its))
    plan = production.answer(101.0)
    production.carried_out(plan, run.jobs, 130.0)
    assert "a spot notice" in plan.reason
    assert not production.state.jobs_on(node)
    found = {"kind": K.NODE_LOST, "method": DetectionMethod.NODE_HEALTH, "seen_at": 225.0}
    production.tell(FailureDetected(id="lost", at=225.0, failure=Failure(id="lost", **found, **its)))
    assert production.answer(226.0) is None
    assert not [it for it in production.state.incidents.values() if it.is_failure]


def test_without_detection_a_collective_has_to_give_up() -> None:
    found = simulate(without_detection(), trace(fault(1000.0, K.CUDA_ERROR, NODE_OF_A)), CLUSTER, JOBS)
    assert trained(found, "a")[-1][0] > 1000.0 + CLUSTER.timeout_s


def test_without_the_nearest_source_work_since_the_last_save_is_lost() -> None:
    found = simulate(without_nearest_principle(), trace(fault(1700.0, K.CUDA_ERROR, NODE_OF_A)), CLUSTER, JOBS)
    (wasted,) = [segment for segment in of(found, "a") if segment.use is Use.WASTED_PROGRESS_FROM_DISRUPTION]
    assert wasted.duration_s == pytest.approx(1700.3, abs=0.01)  # when the plan begins, 1800 s after the last save at most


@pytest.mark.parametrize("made", [trace_a, trace_b])
def test_no_idea_does_harm(made: type[Trace]) -> None:
    """On one seed of each of the paper's traces; on which seeds an idea does not pay is what the simulator reports."""
    jobs = (*JOBS, job("c", sizes=(8, 16, 32, 48)), job("d", weight=0.5))
    cluster = replace(CLUSTER, num_nodes=16)
    whole = of_outcome(simulate(Unicron(), made(1), cluster, jobs)).accumulated_waf
    for ablation in ABLATIONS:
        less = of_outcome(simulate(ablation(), made(1), cluster, jobs)).accumulated_waf
        assert less <= whole * 1.0001, ablation.__name__


def test_every_kind_has_a_way_to_be_seen() -> None:
    for kind in ErrorKind:
        assert detection_s(kind, 10.0) > 0
        assert durations.undetected_s(kind, CLUSTER) >= 5.7
        assert DEFAULT_SEVERITY[told_as(kind)] == DEFAULT_SEVERITY[kind]
    assert method_of(K.NODE_LOST) is DetectionMethod.NODE_HEALTH


# invariants, under whatever may come


@STORM
@given(st.integers(0, 10**6), st.sampled_from([Unicron, *ABLATIONS]), st.sampled_from([1.0, 3600.0]))
def test_storms_break_no_invariant_and_leave_no_job_behind(seed: int, policy: type[Unicron], repair_s: float) -> None:
    """Faults of all kinds by the hundred, some during the answers to others, and enough at once to trip the breaker."""
    hazard = Hazard(
        per_node_day=20.0,
        spread=1.0,
        burstiness=2.0,
        kinds=ALL_KINDS if seed % 2 else FIGURE_1,
        repair=Repair(median_s=repair_s, sigma=1.0),
        episodes=(Episode(from_s=20_000.0, until_s=22_000.0, factor=50.0),),
    )
    made = generated(hazard, seed, num_nodes=4, duration_s=86_400.0)
    found = simulate(policy(), made, replace(CLUSTER, mtbf_gpu_s=1e6), [*JOBS, job("c", arrives_s=30_000.0, sizes=(1, 2, 3))])
    assert found.faults
    last = {segment.job: segment for segment in found.segments if segment.until_s == made.duration_s and segment.gpus}
    stuck = [s for s in last.values() if s.job and s.use is not Use.TRAINING and s.duration_s > 7_200.0]
    assert not stuck


def state_of(**slots: tuple[Slot, ...]) -> ClusterState:
    """Two nodes of two GPUs, and jobs of generation 2 where they are said to be."""
    nodes = {name: Node(id=name, boot="1", address=name, num_gpus=2) for name in ("m", "n")}
    jobs = {
        name: JobState(
            spec=JobSpec(job=name, max_gpus=4),
            generation=2,
            assignment=Assignment(job=name, generation=2, layout=Layout(dp=len(own)), slots=own),
        )
        for name, own in slots.items()
    }
    return ClusterState(seq=5, nodes=nodes, jobs=jobs)


def decided(state: ClusterState) -> PlanDecided:
    gpus = {name: job.gpus for name, job in state.jobs.items()}
    plan = Plan(id="p", kind=PlanKind.REALLOCATE, incidents=(), attempt=1, basis_seq=5, reason="", gpus=gpus)
    return PlanDecided(id="p", at=0.0, plan=plan)


M0, M1, N0 = Slot("m", 0), Slot("m", 1), Slot("n", 0)


def test_the_invariants_see_what_they_are_for() -> None:
    fine = state_of(a=(M0,), b=(N0,))
    event = decided(fine)
    assert broken(fine, event, replace(fine, seq=6)) is None
    assert "entry 5 to 8" in str(broken(fine, event, replace(fine, seq=8)))
    older = replace(fine.with_job(replace(fine.jobs["a"], generation=1)), seq=6)
    assert "fell from 2 to 1" in str(broken(fine, event, older))
    twice = state_of(a=(M0,), b=(M0,))
    assert "which another job has" in str(broken(twice, decided(twice), replace(twice, seq=6)))
    assert "but places 2" in str(broken(fine, event, replace(state_of(a=(M0, M1), b=(N0,)), seq=6)))
    moved = replace(state_of(a=(M1,), b=(N0,)), seq=6)
    assert "changes a, but has no step" in str(broken(fine, event, moved))
    other = NodeSuspected(id="s", at=0.0, node="m", boot="1", reason="")
    assert broken(fine, other, replace(fine, seq=6)) is None


# the coarse mode


def test_the_fleet_earns_what_unicron_earns() -> None:
    """Both on a cluster that both can simulate: ranks without places change the figure by less than 2%."""
    jobs = [
        job(name, weight=weight, sizes=range(8, 72, 8)) for name, weight in (("a", 1.0), ("b", 2.0), ("c", 0.5), ("d", 1.5))
    ]
    cluster = replace(CLUSTER, num_nodes=16)
    for seed in range(3):
        fine, coarse = (simulate(policy, trace_b(seed), cluster, jobs) for policy in (Unicron(), Fleet()))
        assert of_outcome(coarse).accumulated_waf == pytest.approx(of_outcome(fine).accumulated_waf, rel=0.02)


@STORM
@given(st.integers(0, 10**6))
def test_the_fleet_keeps_to_the_hardware(seed: int) -> None:
    hazard = Hazard(per_node_day=20.0, kinds=ALL_KINDS, repair=Repair(median_s=3600.0, sigma=1.0))
    made = generated(hazard, seed, num_nodes=12, duration_s=86_400.0)
    jobs = [*JOBS, job("c", arrives_s=30_000.0), job("d", work_flop=8e12 * 20_000, sizes=(8,), weight=9.0)]
    found = simulate(Fleet(), made, SimCluster(num_nodes=12, mtbf_gpu_s=1e6), jobs)
    assert found.faults
    assert any(segment.job == "c" and segment.use is Use.TRAINING for segment in found.segments)


def test_a_fleet_is_shared_in_whole_nodes() -> None:
    with pytest.raises(Exception, match="has the size 4: a fleet is shared in nodes of 8"):
        simulate(Fleet(), trace(), CLUSTER, [job("a", sizes=(4, 8))])
