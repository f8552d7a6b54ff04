"""A node that is going to leave: its jobs move as planned, and its end costs nothing; nobody is blamed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Scene, running_pair

from unicron_lib.cli.look import node_rows
from unicron_lib.domain.actions import Continue, Respond, Rest
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import BreakerTripped, NodeQuarantined, NodeReleased
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.journal import fold_all
from unicron_lib.domain.plans import PlanKind, StepKind
from unicron_lib.journal import dump_state, state_json
from unicron_lib.report import clock, incident_markdown
from unicron_lib.simulation.journal_segments import of_journal

NODES = ("node-1", "node-2", "node-3", "node-4")


def drained(scene: Scene, plan: str) -> None:
    """Carry the plan out as far as its ranks have parted."""
    steps = scene.state.plans[plan].plan.steps
    for _ in range(sum(step.kind is StepKind.DRAIN for step in steps)):
        scene.step(plan)


def failures(scene: Scene) -> list[str]:
    return [it.kind for it in scene.state.incidents.values() if it.is_failure]


def test_the_jobs_of_a_leaving_node_move_as_planned_and_no_budget_is_touched():
    scene = running_pair()
    (victim, *_) = scene.state.jobs["gpt-a"].assignment.nodes
    scene.leave(victim)
    assert scene.state.nodes[victim].status is NodeStatus.LEAVING
    scene.settle()
    (plan,) = [it.plan for it in scene.state.plans.values() if it.plan.reason.startswith(f"{victim} leaves: ")]
    assert plan.kind is PlanKind.REALLOCATE
    assert {victim} <= {node for step in plan.steps if step.kind is StepKind.DRAIN for node in step.nodes}
    for job in scene.state.jobs.values():
        assert job.status is JobStatus.RUNNING
        assert victim not in job.nodes
        assert (job.failed_times, job.stuck_restarts, job.failed_at) == ((), 0, None)
    assert failures(scene) == []


def test_what_remains_of_a_job_keeps_its_memory():
    """Ranks on the nodes that stay are parked together at an iteration's end, not started anew."""
    scene = running_pair()
    (victim, home) = scene.state.jobs["gpt-a"].assignment.nodes
    scene.leave(victim)
    scene.now += 1.5
    plan = scene.plan(scene.decide())
    holds = [step.hold for step in plan.steps if step.kind is StepKind.DRAIN and step.job == "gpt-a"]
    assert all(hold is not None and not hold.abort for hold in holds)
    assert {slot.node for hold in holds for slot in hold.kept} >= {home}


def test_the_loss_of_an_emptied_node_opens_no_incident_and_does_not_make_it_one_that_comes_and_goes():
    scene = running_pair()
    scene.leave("node-1")
    scene.settle()
    known = dict(scene.state.incidents)
    scene.lose("node-1")
    node = scene.state.nodes["node-1"]
    assert (node.status, node.has_left, node.losses) == (NodeStatus.LOST, True, ())
    assert node.reason == "left as announced: a spot interruption notice says terminate"
    assert scene.state.incidents == known
    assert isinstance(scene.decide(), Rest)


def test_ranks_that_have_parted_are_safe_before_the_plan_is_complete():
    """The agent ends as soon as its ranks are gone; its jobs may still be on their way to where they move."""
    scene = running_pair()
    scene.leave("node-1")
    scene.now += 1.5
    plan = scene.plan(scene.decide()).id
    drained(scene, plan)
    scene.lose("node-1")
    assert failures(scene) == []
    action = scene.decide()
    assert isinstance(action, Continue)
    assert action.plan == plan


def test_a_node_that_goes_before_its_ranks_have_parted_is_lost_as_any_other():
    scene = running_pair()
    scene.leave("node-1")
    scene.now += 1.5
    scene.plan(scene.decide())
    scene.lose("node-1")
    node = scene.state.nodes["node-1"]
    assert (node.status, node.has_left) == (NodeStatus.LOST, False)
    assert failures(scene) == [ErrorKind.NODE_LOST]
    action = scene.decide()
    assert isinstance(action, Respond)
    assert action.supersedes
    scene.settle()


def test_a_plan_that_puts_ranks_on_the_node_does_not_make_it_safe():
    """Drained for a move to the node that then announces its end: that plan is made anew, and a loss is a loss."""
    scene = running_pair()
    scene.lose("node-4")
    scene.settle()
    scene.join("node-4")
    scene.now += 1.5
    plan = scene.plan(scene.decide())
    assert "node-4" in {node for it in plan.assignments for node in it.nodes}
    drained(scene, plan.id)
    scene.leave("node-4")
    action = scene.decide()
    assert isinstance(action, Respond)
    assert action.supersedes == plan.id
    scene.lose("node-4")
    assert scene.state.nodes["node-4"].has_left is False


def test_its_next_life_is_as_any_other_also_if_nobody_saw_the_end_of_the_one_before():
    for is_seen in (True, False):
        scene = running_pair()
        scene.leave("node-1")
        scene.settle()
        if is_seen:
            scene.lose("node-1")
        scene.join("node-1")
        node = scene.state.nodes["node-1"]
        assert (node.status, node.reason, node.leaves_at, node.has_left) == (NodeStatus.READY, "", 0.0, False)
        assert failures(scene) == []
        scene.settle()
        assert sum(job.gpus for job in scene.state.jobs.values()) == 8


def test_a_new_life_before_the_ranks_had_parted_is_the_loss_of_the_old_one():
    scene = running_pair()
    scene.leave("node-1")
    scene.join("node-1")
    assert failures(scene) == [ErrorKind.NODE_LOST]
    scene.settle()


def test_nobody_but_a_new_life_lifts_it_and_a_person_may_isolate_the_node_for_longer():
    scene = running_pair()
    scene.leave("node-1")
    scene.tell(NodeReleased(id="released", at=scene.now, node="node-1"))
    assert scene.state.nodes["node-1"].status is NodeStatus.LEAVING
    scene.tell(NodeQuarantined(id="by hand", at=scene.now, node="node-1", reason="isolated by a person: look at it"))
    scene.join("node-1")
    assert scene.state.nodes["node-1"].status is NodeStatus.QUARANTINED


def test_it_is_told_once_in_a_life_and_a_word_of_an_earlier_life_means_nothing():
    scene = running_pair()
    scene.leave("node-1")
    (first,) = [it for it in scene.state.open_incidents if it.kind == "leave_announced"]
    late = scene.events[-1]
    scene.leave("node-1", in_s=5.0)
    assert [it.id for it in scene.state.open_incidents] == [first.id]
    assert scene.state.nodes["node-1"].leaves_at == late.leaves_at
    scene.settle()
    scene.join("node-1")
    scene.tell(late)
    assert scene.state.nodes["node-1"].status is NodeStatus.READY


def test_a_job_without_other_room_is_drained_and_waits():
    scene = Scene()
    scene.join("node-1")
    scene.submit("gpt-a", max_gpus=2)
    scene.settle()
    scene.leave("node-1")
    scene.now += 1.5
    plan = scene.plan(scene.decide())
    assert plan.paused == ("gpt-a",)
    assert [(step.kind, step.nodes) for step in plan.steps] == [(StepKind.DRAIN, ("node-1",)), (StepKind.STOP, ("node-1",))]
    scene.settle()
    assert scene.state.jobs["gpt-a"].status is JobStatus.QUEUED
    scene.lose("node-1")
    assert failures(scene) == []
    scene.join("node-2")
    scene.settle()
    assert scene.state.jobs["gpt-a"].assignment.nodes == ("node-2",)


def test_most_nodes_may_leave_at_once_without_the_breaker():
    """As when the price of spot instances rises; what is lost beside them is judged by itself."""
    scene = running_pair()
    for node in ("node-1", "node-2", "node-3"):
        scene.leave(node)
    scene.settle()
    for node in ("node-1", "node-2", "node-3"):
        scene.lose(node)
    scene.settle()
    assert scene.state.breaker_since is None
    assert failures(scene) == []
    scene.lose("node-4")
    scene.settle()
    assert scene.state.breaker_since is None, "one node is not most of the cluster"


def test_a_breaker_that_has_tripped_keeps_nobody_from_leaving():
    scene = running_pair()
    scene.tell(BreakerTripped(id="tripped", at=scene.now, reason="a person has to look"))
    scene.leave("node-1")
    scene.settle()
    assert not scene.state.jobs_on("node-1")


def test_two_that_leave_together_are_planned_for_together():
    scene = running_pair()
    before = len(scene.state.plans)
    scene.leave("node-1")
    scene.now += 0.5
    scene.leave("node-2")
    scene.settle()
    (plan,) = list(scene.state.plans.values())[before:]
    assert len(plan.plan.incidents) == 2


def test_broken_hardware_is_isolated_also_on_a_node_that_leaves():
    scene = running_pair()
    scene.leave("node-1")
    scene.fault(ErrorKind.ECC_ERROR, "node-1")
    scene.settle()
    assert scene.state.nodes["node-1"].status is NodeStatus.QUARANTINED


def test_people_are_told_why_and_until_when():
    scene = running_pair()
    scene.leave("node-1", in_s=60.0)
    row = next(row for row in node_rows(scene.state) if row["node"] == "node-1")
    assert (row["status"], row["reason"]) == ("leaving", "a spot interruption notice says terminate")
    assert row["until"] == f"{clock(scene.now + 60.0)} UTC"
    scene.settle()
    (incident,) = [it for it in scene.state.incidents.values() if it.kind == "leave_announced"]
    assert incident.status is IncidentStatus.CLOSED
    story = incident_markdown(scene.state, incident.id)
    assert story.startswith("# leave_announced: node-1")
    assert "node-1 leaves: a spot interruption notice says terminate" in story


def test_a_plan_that_is_made_after_the_end_does_not_give_a_reason_that_is_over():
    scene = running_pair()
    scene.leave("node-1")
    scene.join("node-1")
    scene.now += 1.5
    respond = scene.decide()
    assert isinstance(respond, Respond)
    assert "leave announced: node-1" in respond.reason


def test_what_a_leave_costs_is_its_own_in_the_accounts():
    scene = running_pair()
    scene.leave("node-1")
    scene.settle()
    scene.lose("node-1")
    (incident,) = [it for it in scene.state.incidents.values() if it.kind == "leave_announced"]
    books = of_journal(scene.events, end_s=scene.now + 100.0)
    assert books.losses[incident.id].gpu_s > 0


def test_a_snapshot_of_before_can_be_read():
    scene = running_pair()
    scene.leave("node-1")
    dumped = dump_state(scene.state)
    for node in dumped["nodes"].values():
        del node["leaves_at"], node["has_left"]
    assert state_json.validate_python(dumped).nodes["node-1"].has_left is False


@settings(max_examples=25, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(NODES), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_however_many_leave_and_come_back_no_job_has_failed(moves):
    scene = running_pair()
    for node, is_answered, is_seen in moves:
        scene.leave(node)
        scene.settle() if is_answered else None
        if is_seen and not scene.state.jobs_on(node):
            scene.lose(node)
        if not scene.state.jobs_on(node):
            scene.join(node)
    scene.settle()
    assert failures(scene) == []
    assert scene.state.breaker_since is None
    assert all((job.failed_times, job.stuck_restarts) == ((), 0) for job in scene.state.jobs.values())
    assert fold_all(scene.events) == scene.state


@pytest.mark.parametrize("status", [NodeStatus.LOST, NodeStatus.QUARANTINED])
def test_who_is_out_already_does_not_leave(status):
    scene = running_pair()
    if status is NodeStatus.LOST:
        scene.lose("node-1")
    else:
        scene.tell(NodeQuarantined(id="by hand", at=scene.now, node="node-1", reason="isolated by a person: noisy"))
    open_before = scene.state.open_incidents
    scene.leave("node-1")
    assert scene.state.nodes["node-1"].status is status
    assert scene.state.open_incidents == open_before
