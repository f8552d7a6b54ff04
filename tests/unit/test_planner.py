"""Plans for the stories of the demo: 4 nodes of 2 GPUs, two jobs."""

import itertools
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.cluster import ClusterState, Incident, Node, NodeStatus
from unicron_lib.domain.events import PlanDecided, RecoveryCompleted, StepCompleted
from unicron_lib.domain.failures import Severity
from unicron_lib.domain.jobs import JobSpec, JobState, JobStatus
from unicron_lib.domain.journal import fold
from unicron_lib.domain.plans import Layout, Plan, PlanKind, Slot, StepKind
from unicron_lib.planning.planner import make_plan
from unicron_lib.training.flops import iteration_flops

JOBS = {
    "gpt-a": JobSpec(job="gpt-a", weight=2.0, min_gpus=2, throughput_flops={2: 5.0e8, 4: 9.0e8, 6: 10.8e8, 8: 12.0e8}),
    "gpt-b": JobSpec(job="gpt-b", min_gpus=2, max_gpus=4, throughput_flops={2: 4.8e8, 4: 9.0e8}),
}
INCIDENT = Incident(id="inc-1", kind="job_submitted", severity=None, opened_at=0.0, updated_at=0.0)


def launched(**specs: JobSpec) -> ClusterState:
    """Two new jobs on an idle cluster."""
    nodes = [Node(id=f"node-{i}", boot="boot-1", address="127.0.0.1", num_gpus=2) for i in range(4)]
    return ClusterState(
        seq=9,
        nodes={node.id: node for node in nodes},
        jobs={name: JobState(spec=spec, submission="s") for name, spec in (specs or JOBS).items()},
        incidents={INCIDENT.id: INCIDENT},
    )


def respond(kind: PlanKind = PlanKind.REALLOCATE, reason: str = "something happened", **more: object) -> Respond:
    return Respond(kind=kind, incidents=("inc-1",), attempt=1, reason=reason, **more)  # type: ignore[arg-type]


def plan_for(state: ClusterState, action: Respond, **more: object) -> Plan:
    settings = {"measured": {}, "mtbf_gpu_s": 6.2e7, "time_limit_s": 10.0, "timer": time.perf_counter} | more
    return make_plan(state, action, **settings)  # type: ignore[arg-type]


def decided(state: ClusterState, plan: Plan, supersedes: str | None = None) -> ClusterState:
    state = replace(state, incidents={**state.incidents, INCIDENT.id: INCIDENT})  # one more thing to plan for
    return fold(state, PlanDecided(id=f"{plan.id}/decided", at=1.0, plan=plan, supersedes=supersedes))


def done(state: ClusterState, plan: Plan, *kinds: StepKind) -> ClusterState:
    """After the steps of these kinds, all steps and the end of the recovery if none are given."""
    for step in plan.steps:
        if not kinds or step.kind in kinds:
            state = fold(state, StepCompleted(id=step.id, at=2.0, plan=plan.id))
    return state if kinds else fold(state, RecoveryCompleted(id=f"{plan.id}/done", at=3.0, plan=plan.id))


def running(**specs: JobSpec) -> ClusterState:
    state = launched(**specs)
    plan = plan_for(state, respond())
    return done(decided(state, plan), plan)


def without(state: ClusterState, node: str, status: NodeStatus = NodeStatus.LOST) -> ClusterState:
    return replace(state, nodes={**state.nodes, node: replace(state.nodes[node], status=status)})


def with_status(state: ClusterState, job: str, status: JobStatus) -> ClusterState:
    return replace(state, jobs={**state.jobs, job: replace(state.jobs[job], status=status)})


def slots(*names: str) -> tuple[Slot, ...]:
    return tuple(Slot(f"node-{name[0]}", int(name[1])) for name in names)


def kinds(plan: Plan, job: str) -> list[StepKind]:
    return [step.kind for step in plan.steps if step.job == job]


def check_no_gpu_is_given_twice(state: ClusterState) -> None:
    held = [slot for job in state.jobs.values() if job.assignment for slot in job.assignment.slots]
    assert len(held) == len(set(held))


def test_two_new_jobs_share_the_cluster() -> None:
    plan = plan_for(launched(), respond(reason="job submitted: gpt-a, gpt-b"))
    assert plan.gpus == {"gpt-a": 4, "gpt-b": 4}
    assert [assignment.slots for assignment in plan.assignments] == [
        slots("00", "01", "10", "11"),
        slots("20", "21", "30", "31"),
    ]
    assert {assignment.generation for assignment in plan.assignments} == {1}
    assert [(step.kind, step.job) for step in plan.steps] == [
        (kind, job) for kind in (StepKind.RESTORE, StepKind.LAUNCH, StepKind.RESUME) for job in ("gpt-a", "gpt-b")
    ]
    assert plan.optimal
    assert plan.gap == 0.0
    assert "8 of 8 GPUs can be used. GPUs: gpt-a 0 -> 4, gpt-b 0 -> 4." in plan.reason


def test_a_crashed_rank_restarts_where_it_was_and_the_other_job_is_left_alone() -> None:
    state = running()
    plan = plan_for(state, respond(PlanKind.RESTART, "process_exit on gpt-a rank 1", faulted=("gpt-a",)))
    (assignment,) = plan.assignments
    assert assignment.slots == state.jobs["gpt-a"].assignment.slots
    assert assignment.generation == 2
    assert plan.method == "in place"
    assert plan.gpus == {"gpt-a": 4, "gpt-b": 4}
    assert {step.job for step in plan.steps} == {"gpt-a"}
    assert kinds(plan, "gpt-a") == list(StepKind)
    assert plan.reason == (
        "process_exit on gpt-a rank 1. gpt-a (4 GPUs) starts again where it is, and no other job is touched."
    )
    assert done(decided(state, plan), plan).jobs["gpt-a"].generation == 2


def test_a_restart_whose_gpus_are_gone_becomes_a_reallocation() -> None:
    plan = plan_for(without(running(), "node-1"), respond(PlanKind.RESTART, faulted=("gpt-a",)))
    assert plan.kind is PlanKind.REALLOCATE
    assert plan.gpus == {"gpt-a": 4, "gpt-b": 2}


@pytest.mark.parametrize("lost", ["node-0", "node-1", "node-2", "node-3"])
def test_a_lost_node_shrinks_the_job_that_is_worth_less(lost: str) -> None:
    state = without(running(), lost)
    faulted = "gpt-a" if lost in {"node-0", "node-1"} else "gpt-b"
    plan = plan_for(state, respond(reason=f"node_lost on {lost} (SEV1)", faulted=(faulted,)))
    assert plan.gpus == {"gpt-a": 4, "gpt-b": 2}
    assert plan.reason.startswith(f"node_lost on {lost} (SEV1). 6 of 8 GPUs can be used. GPUs: gpt-a 4 -> 4, gpt-b 4 -> 2.")
    assert {a.job for a in plan.assignments} == ({"gpt-a", "gpt-b"} if faulted == "gpt-a" else {"gpt-b"})
    assert all(lost not in step.nodes for step in plan.steps)
    after = done(decided(state, plan), plan)
    check_no_gpu_is_given_twice(after)
    assert after.jobs["gpt-a"].gpus == 4
    assert after.jobs["gpt-b"].gpus == 2


def test_a_node_that_comes_back_goes_to_the_job_that_shrank() -> None:
    state = without(running(), "node-3")
    plan = plan_for(state, respond(faulted=("gpt-b",)))
    state = without(done(decided(state, plan), plan), "node-3", NodeStatus.READY)
    plan = plan_for(state, respond(reason="node joined: node-3"))
    assert plan.gpus == {"gpt-a": 4, "gpt-b": 4}
    (assignment,) = plan.assignments
    assert (assignment.job, assignment.generation, assignment.slots) == ("gpt-b", 3, slots("20", "21", "30", "31"))


def test_the_gpus_of_a_finished_job_go_to_the_other() -> None:
    state = with_status(running(), "gpt-b", JobStatus.FINISHED)
    plan = plan_for(state, respond(reason="job finished: gpt-b"))
    assert plan.gpus == {"gpt-a": 8}
    assert plan.paused == ()
    assert kinds(plan, "gpt-b") == [StepKind.STOP]
    assert kinds(plan, "gpt-a") == list(StepKind)
    after = done(decided(state, plan), plan).jobs["gpt-b"]
    assert (after.status, after.gpus, after.generation) == (JobStatus.FINISHED, 0, 2)


def test_a_cancelled_job_saves_before_it_stops() -> None:
    plan = plan_for(with_status(running(), "gpt-b", JobStatus.CANCELLED), respond())
    assert kinds(plan, "gpt-b") == [StepKind.DRAIN, StepKind.STOP]
    assert plan.gpus == {"gpt-a": 8}


def test_a_job_that_is_given_up_loses_its_gpus() -> None:
    state = running()
    plan = plan_for(state, respond(faulted=("gpt-b",), stop={"gpt-b": "an error in its own code"}))
    assert plan.gpus == {"gpt-a": 8}
    assert plan.stopped == {"gpt-b": "an error in its own code"}
    after = done(decided(state, plan), plan)
    assert {name: (job.status, job.gpus) for name, job in after.jobs.items()} == {
        "gpt-a": (JobStatus.RUNNING, 8),
        "gpt-b": (JobStatus.FAILED, 0),
    }


def test_a_quarantined_node_is_left_and_its_ranks_are_stopped() -> None:
    state = running()
    plan = plan_for(state, respond(faulted=("gpt-b",), quarantine={"node-3": "ecc_error"}))
    assert plan.quarantined == {"node-3": "ecc_error"}
    assert plan.gpus == {"gpt-a": 4, "gpt-b": 2}
    assert all(slot.node != "node-3" for assignment in plan.assignments for slot in assignment.slots)
    stop = next(step for step in plan.steps if step.kind is StepKind.STOP)
    assert stop.nodes == ("node-2", "node-3")


def test_a_job_without_room_waits_and_the_reason_says_why() -> None:
    state = running()
    for node in ("node-1", "node-2", "node-3"):
        state = without(state, node)
    plan = plan_for(state, respond(faulted=("gpt-a", "gpt-b")))
    assert plan.gpus == {"gpt-a": 2, "gpt-b": 0}
    assert plan.paused == ("gpt-b",)
    assert "gpt-b waits: the 2 GPUs that it needs at least bring more in other jobs." in plan.reason
    # nobody is left to talk to, but the job must still lose its GPUs and its old generation be fenced
    assert [(step.kind, step.nodes) for step in plan.steps if step.job == "gpt-b"] == [(StepKind.STOP, ())]
    after = done(decided(state, plan), plan).jobs["gpt-b"]
    assert (after.status, after.gpus, after.generation) == (JobStatus.QUEUED, 0, 2)


def test_a_cluster_without_nodes_pauses_everything_without_an_exception() -> None:
    state = running(**{name: replace(spec, must_run=True) for name, spec in JOBS.items()})
    for node in tuple(state.nodes):
        state = without(state, node)
    plan = plan_for(state, respond(faulted=("gpt-a", "gpt-b")))
    assert plan.gpus == {"gpt-a": 0, "gpt-b": 0}
    assert plan.paused == ("gpt-a", "gpt-b")
    assert "need 4 GPUs (gpt-a at least 2, gpt-b at least 2), only 0 can be used" in plan.reason


def test_without_a_table_or_a_measurement_every_job_gets_something_when_it_must() -> None:
    bare = {name: JobSpec(job=name, min_gpus=2, must_run=True, weight=weight) for name, weight in (("one", 1.0), ("two", 1.0))}
    plan = plan_for(launched(**bare), respond())
    assert sum(plan.gpus.values()) == 8
    assert min(plan.gpus.values()) >= 2


def test_measurements_decide_where_there_is_no_table() -> None:
    bare = {name: JobSpec(job=name, min_gpus=2, max_gpus=6, global_batch_size=24) for name in ("one", "two")}
    measured = {"one": {2: 1e9, 6: 1.1e9}, "two": {2: 1e9, 6: 3e9}}
    assert plan_for(launched(**bare), respond(), measured=measured).gpus == {"one": 2, "two": 6}


def test_spares_are_held_back_until_a_loss_uses_them_up() -> None:
    state = launched()
    plan = plan_for(state, respond(), spare_gpus=2)
    assert sum(plan.gpus.values()) == 6
    assert "6 of 8 GPUs can be used" in plan.reason
    assert "2 GPUs more are healthy and kept as spares" in plan.reason
    settled = without(done(decided(state, plan), plan), "node-3")
    after = plan_for(settled, respond(), spare_gpus=2)
    assert after.gpus == plan.gpus
    assert "spares" not in after.reason


def test_a_job_that_must_run_gets_the_spares() -> None:
    state = launched(one=JobSpec(job="one", min_gpus=8, must_run=True))
    plan = plan_for(state, respond(), spare_gpus=2)
    assert plan.gpus == {"one": 8}
    assert "No spares are kept: jobs that must run need them" in plan.reason
    lost = plan_for(without(without(state, "node-0"), "node-1"), respond(), spare_gpus=6)
    assert lost.gpus == {"one": 0}
    assert "jobs that must run wait too" in lost.reason


def test_a_move_costs_by_where_the_state_comes_from() -> None:
    """One node lost: a replica lives on. All nodes of the job lost: the store has it, half a save interval back."""
    specs = JOBS | {"gpt-a": replace(JOBS["gpt-a"], max_gpus=4)}
    state = running(**specs)
    held = sorted(state.jobs["gpt-a"].nodes)
    partly = without(state, held[0])
    wholly = without(partly, held[1])
    spec = specs["gpt-a"]
    lost_flop = spec.weight * spec.throughput_flops[4] * spec.transition_s
    redone_flop = spec.weight * iteration_flops(spec) * spec.save_interval / 2
    for scene, num_gpus, expected in ((partly, 6, lost_flop), (wholly, 4, lost_flop + redone_flop)):
        plan = plan_for(scene, respond(faulted=("gpt-a",)))
        assert len(held) == 2
        assert {a.job for a in plan.assignments} | set(plan.paused) >= {"gpt-a"}
        moved = plan.gpus["gpt-b"] != 4
        others = JOBS["gpt-b"].throughput_flops[4] * JOBS["gpt-b"].transition_s if moved else 0.0
        assert worth(scene, plan, num_gpus) - plan.gain == pytest.approx(expected + others, rel=1e-3)


def test_a_job_that_is_kept_in_memory_loses_what_came_after_the_last_copy() -> None:
    """A job of one rank, which failed: nobody lives on, but its node has the state of two iterations ago, or a peer has."""
    spec = JobSpec(job="one", max_gpus=1, throughput_flops={1: 5.0e8}, memory_interval=4)
    running_one = running(one=spec)
    state = replace(running_one, jobs={"one": replace(running_one.jobs["one"], restored=True)})
    (home,) = state.jobs["one"].nodes
    redone_flop = iteration_flops(spec) * spec.memory_interval / 2
    for scene, num_gpus in ((state, 8), (without(state, home), 6)):
        plan = plan_for(scene, respond(faulted=("one",)))
        lost_flop = spec.throughput_flops[1] * spec.transition_s + redone_flop
        assert worth(scene, plan, num_gpus) - plan.gain == pytest.approx(lost_flop, rel=1e-3)


def worth(state: ClusterState, plan: Plan, num_gpus: int) -> float:
    """What the jobs earn until the next failure, in FLOP."""
    specs = {name: job.spec for name, job in state.jobs.items()}
    flops = math.fsum(specs[name].weight * specs[name].throughput_flops.get(x, 0.0) for name, x in plan.gpus.items())
    return flops * 6.2e7 / num_gpus


def test_failures_that_were_seen_shorten_the_time_a_plan_counts_on() -> None:
    state = running()
    lost = Incident(id="inc-2", kind="node_lost", severity=Severity.SEV1, opened_at=1.0, updated_at=1.0)
    before = plan_for(state, respond())
    after = plan_for(state.with_incident(lost), replace(respond(), incidents=("inc-2",)))
    assert after.gpus == before.gpus
    assert after.gain == pytest.approx(before.gain / 2)


def test_granularity_is_kept() -> None:
    plan = plan_for(launched(one=JobSpec(job="one", max_gpus=7, global_batch_size=24)), respond(), granularity_gpus=2)
    assert plan.gpus == {"one": 6}


def test_no_time_still_gives_a_plan() -> None:
    plan = plan_for(running(), respond(), time_limit_s=0.0)
    assert sum(plan.gpus.values()) <= 8
    assert plan.upper_bound >= plan.gain


def test_the_same_state_gives_the_same_plan_and_another_state_another_id() -> None:
    first, second = (plan_for(launched(), respond()) for _ in range(2))
    assert replace(first, solve_s=0.0) == replace(second, solve_s=0.0)
    assert plan_for(replace(launched(), seq=10), respond()).id != first.id
    assert len({step.id for step in first.steps}) == len(first.steps)


def test_nothing_to_change_changes_nothing() -> None:
    plan = plan_for(running(), respond())
    assert (plan.assignments, plan.paused, plan.steps) == ((), (), ())


INTERRUPTIONS = [
    (),
    (StepKind.DRAIN,),
    (StepKind.DRAIN, StepKind.STOP),
    (StepKind.DRAIN, StepKind.STOP, StepKind.RESTORE),
    (StepKind.DRAIN, StepKind.STOP, StepKind.RESTORE, StepKind.LAUNCH),
]


@pytest.mark.parametrize("finished", INTERRUPTIONS[1:])
@pytest.mark.parametrize("second", ["node-0", "node-1", "node-2"])
def test_a_second_loss_during_a_transition_moves_whatever_was_on_the_move(finished: tuple[StepKind, ...], second: str) -> None:
    state = without(running(), "node-3")
    first = plan_for(state, respond(faulted=("gpt-b",)))
    state = without(done(decided(state, first), first, *finished), second)
    plan = plan_for(state, respond(faulted=("gpt-a",), supersedes=first.id))
    assert sum(plan.gpus.values()) == 4
    assert kinds(plan, "gpt-b"), "gpt-b was on the move: it needs a new generation"
    state = decided(state, plan, supersedes=first.id)
    assert state.jobs["gpt-b"].generation == 3
    after = done(state, plan)
    check_no_gpu_is_given_twice(after)
    assert {name: job.gpus for name, job in after.jobs.items()} == plan.gpus


def test_a_restart_during_a_restart_carries_on_with_both_jobs() -> None:
    state = running()
    first = plan_for(state, respond(PlanKind.RESTART, faulted=("gpt-a",)))
    state = done(decided(state, first), first, StepKind.DRAIN, StepKind.STOP)
    plan = plan_for(state, respond(PlanKind.RESTART, faulted=("gpt-b",), supersedes=first.id))
    assert {a.job: a.generation for a in plan.assignments} == {"gpt-a": 3, "gpt-b": 2}
    assert {a.job: a.slots for a in plan.assignments} == {a.job: a.slots for a in [*first.assignments, *plan.assignments[1:]]}


def test_a_job_that_was_being_paused_can_be_taken_back() -> None:
    state = running()
    lost = without(without(without(state, "node-1"), "node-2"), "node-3")
    first = plan_for(lost, respond(faulted=("gpt-a", "gpt-b")))
    lost = decided(lost, first)
    back = replace(lost, nodes=state.nodes)
    plan = plan_for(back, respond(faulted=("gpt-a", "gpt-b"), supersedes=first.id))
    assert plan.gpus == {"gpt-a": 4, "gpt-b": 4}
    after = done(decided(back, plan, supersedes=first.id), plan)
    check_no_gpu_is_given_twice(after)
    assert {name: job.generation for name, job in after.jobs.items()} == {"gpt-a": 3, "gpt-b": 3}


def test_where_an_older_unfinished_plan_wanted_a_job_is_forgotten() -> None:
    state = without(running(), "node-3")
    first = plan_for(state, respond(faulted=("gpt-b",)))
    few = without(without(decided(state, first), "node-1"), "node-2")
    second = plan_for(few, respond(faulted=("gpt-a", "gpt-b"), supersedes=first.id))
    assert second.paused == ("gpt-b",)
    paused = decided(few, second, supersedes=first.id)
    assert paused.jobs["gpt-b"].pending == first.assignment_of("gpt-b"), "the stale one is still there"
    back = replace(paused, nodes=running().nodes)
    third = plan_for(back, respond(supersedes=second.id))
    assert "gpt-b 0 -> 4" in third.reason
    after = done(decided(back, third, supersedes=second.id), third)
    check_no_gpu_is_given_twice(after)
    assert {name: job.gpus for name, job in after.jobs.items()} == {"gpt-a": 4, "gpt-b": 4}


def test_a_job_submitted_again_before_its_old_gpus_were_freed_is_launched_anew() -> None:
    state = with_status(running(), "gpt-b", JobStatus.QUEUED)
    plan = plan_for(state, respond(reason="job submitted: gpt-b"))
    assert kinds(plan, "gpt-b") == list(StepKind)
    assert {a.job: a.generation for a in plan.assignments} == {"gpt-b": 2}


def test_any_sequence_of_losses_and_returns_keeps_the_books_straight() -> None:
    state = running()
    for node, status in itertools.product(tuple(state.nodes), (NodeStatus.LOST, NodeStatus.READY)):
        state = without(state, node, status)
        plan = plan_for(state, respond())
        state = done(decided(state, plan), plan) if plan.steps else state
        check_no_gpu_is_given_twice(state)
        assert {name: job.gpus for name, job in state.jobs.items()} == plan.gpus
        assert plan.gpus == ({"gpt-a": 4, "gpt-b": 2} if status is NodeStatus.LOST else {"gpt-a": 4, "gpt-b": 4})


def test_a_restart_imports_no_solver() -> None:
    code = (
        "import sys, time\n"
        "import unicron_lib.planning.planner as planner\n"
        "from unicron_lib.domain.cluster import ClusterState\n"
        "from unicron_lib.domain.actions import Respond\n"
        "from unicron_lib.domain.plans import PlanKind\n"
        "action = Respond(kind=PlanKind.RESTART, incidents=('i',), attempt=1, reason='r')\n"
        "planner.make_plan(ClusterState(), action, measured={}, mtbf_gpu_s=1.0, timer=time.monotonic)\n"
        "print('cvxpy' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "False\n", found.stderr


def test_a_job_of_cut_replicas_keeps_whole_ones_and_every_rank_its_place() -> None:
    spec = JobSpec(job="cut", min_gpus=4, pipeline_model_parallel_size=2, tensor_model_parallel_size=2)
    state = launched(cut=spec)
    plan = plan_for(state, respond())
    (first,) = plan.assignments
    assert (first.layout, first.num_gpus) == (Layout(tp=2, pp=2, dp=2), 8)
    assert all(first.slots[rank].node == first.slots[rank + 1].node for rank in range(0, 8, 2))
    running = done(decided(state, plan), plan)
    lost = first.slots[0].node
    nodes = {**running.nodes, lost: replace(running.nodes[lost], status=NodeStatus.LOST)}
    (smaller,) = plan_for(replace(running, nodes=nodes), respond()).assignments
    assert smaller.layout == Layout(tp=2, pp=2)
    kept = {slot: first.layout.place(rank) for rank, slot in enumerate(first.slots)}
    assert [(kept[slot].tp, kept[slot].pp) for slot in smaller.slots] == [(0, 0), (1, 0), (0, 1), (1, 1)]
