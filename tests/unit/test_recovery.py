"""The recovery core: who is restarted, what waits, what escalates, what is left alone."""

from dataclasses import replace

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Continue, Respond, Rest, TripBreaker, Wait
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import (
    FailureDetected,
    FaultInjected,
    JobCancelled,
    NodeReleased,
    PlanDecided,
    StepCompleted,
)
from unicron_lib.domain.failures import ECHOES, DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.plans import PlanKind, StepKind
from unicron_lib.domain.timeline import timing
from unicron_lib.errors import IllegalTransition


def test_a_quiet_cluster_rests():
    assert running_pair().decide() == Rest()


def test_planned_changes_wait_for_more_of_them():
    scene = Scene()
    scene.join("node-1")
    first = scene.decide()
    assert isinstance(first, Wait)
    scene.now = first.until
    assert isinstance(scene.decide(), Respond)


def test_a_killed_rank_restarts_in_place_and_nobody_else_notices():
    scene = running_pair()
    before = scene.state.jobs
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1)
    respond = scene.decide()
    assert isinstance(respond, Respond)
    assert (respond.kind, respond.faulted) == (PlanKind.RESTART, ("gpt-a",))
    assert "gpt-a rank 1" in respond.reason
    scene.plan(respond)
    scene.settle()
    after = scene.state.jobs
    assert after["gpt-b"] == before["gpt-b"]
    assert after["gpt-a"].assignment.slots == before["gpt-a"].assignment.slots
    assert after["gpt-a"].generation == before["gpt-a"].generation + 1


def test_echoes_wait_for_their_cause_and_join_it():
    scene = running_pair()
    scene.fail(ErrorKind.CONNECTION_RESET, "gpt-a", rank=0)
    assert isinstance(scene.decide(), Wait)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1)
    (incident,) = scene.state.open_incidents
    assert (incident.kind, len(incident.failures)) == (ErrorKind.PROCESS_EXIT, 2)
    assert scene.decide().kind is PlanKind.RESTART


def test_an_echo_without_a_cause_is_a_reattempt():
    scene = running_pair()
    scene.fail(ErrorKind.CONNECTION_RESET, "gpt-a")
    scene.now += 1.1
    assert scene.decide().kind is PlanKind.REATTEMPT


def test_a_suspected_node_holds_the_decision_until_its_verdict():
    scene = running_pair()
    node = scene.state.jobs["gpt-a"].assignment.slots[-1].node
    scene.fail(ErrorKind.CONNECTION_RESET, "gpt-a")
    scene.suspect(node)
    scene.now += 3
    waiting = scene.decide()
    assert isinstance(waiting, Wait)
    assert node in waiting.reason
    scene.lose(node)
    (incident,) = scene.state.open_incidents
    assert (incident.kind, incident.jobs) == (ErrorKind.NODE_LOST, ("gpt-a",))
    merged = [i for i in scene.state.incidents.values() if i.status is IncidentStatus.MERGED]
    assert [i.merged_into for i in merged] == [incident.id]
    assert scene.decide().kind is PlanKind.REALLOCATE


def test_a_lost_node_moves_gpus_to_where_they_are_worth_most():
    scene = running_pair()
    node = scene.state.jobs["gpt-a"].assignment.nodes[-1]
    scene.lose(node)
    scene.settle()
    assert {name: job.gpus for name, job in scene.state.jobs.items()} == {"gpt-a": 4, "gpt-b": 2}
    assert all(node not in job.nodes for job in scene.state.jobs.values())
    scene.join(node)
    scene.settle()
    assert {name: job.gpus for name, job in scene.state.jobs.items()} == {"gpt-a": 4, "gpt-b": 4}
    scene.finish("gpt-b")
    scene.settle()
    assert scene.state.jobs["gpt-a"].gpus == 8


def test_failures_of_a_replaced_generation_are_stale():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", generation=0)
    assert not scene.state.open_incidents


def test_failures_without_progress_escalate_to_another_node_then_stop_the_job():
    scene = running_pair()
    severities = []
    for _ in range(4):
        scene.fail(ErrorKind.PROCESS_EXIT, "gpt-b", iteration=5)
        scene.now += 1.1
        respond = scene.decide()
        severities.append(respond.kind)
        if respond.quarantine:
            break
        scene.plan(respond)
        scene.settle()
    assert severities == [PlanKind.RESTART, PlanKind.REALLOCATE]
    assert "raised from SEV2" in respond.reason
    scene.plan(respond)
    (quarantined,) = respond.quarantine
    assert scene.state.nodes[quarantined].status is NodeStatus.QUARANTINED
    for _ in range(5):
        scene.settle()
        if scene.state.jobs["gpt-b"].status is JobStatus.FAILED:
            break
        scene.fail(ErrorKind.PROCESS_EXIT, "gpt-b", iteration=5)
    assert scene.state.jobs["gpt-b"].status is JobStatus.FAILED
    assert "without a new iteration" in scene.state.jobs["gpt-b"].reason


@pytest.mark.parametrize("kind", sorted(ECHOES))
def test_who_only_complains_of_its_peers_is_not_isolated_and_the_budget_ends_the_job(kind):
    scene = running_pair()
    kinds = []
    for _ in range(5):
        scene.now += 700  # none of the others is within the window of the budget
        scene.fail(kind, "gpt-a", rank=1, iteration=7)
        scene.fail(kind, "gpt-a", rank=2, iteration=7)
        scene.now += 1.1
        respond = scene.decide()
        kinds.append(respond.kind)
        assert respond.quarantine == {}
        if respond.stop:
            break
        scene.settle()
    assert kinds == [PlanKind.REATTEMPT, PlanKind.RESTART, PlanKind.RESTART, PlanKind.RESTART, PlanKind.REALLOCATE]
    assert set(respond.stop) == {"gpt-a"}


def test_progress_resets_the_escalation():
    scene = running_pair()
    for iteration in (5, 9, 14):
        scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", iteration=iteration)
        assert scene.decide().kind is PlanKind.RESTART
        scene.settle()


def test_the_breaker_stops_mass_isolation():
    scene = running_pair()
    for rank in (0, 2):
        scene.fail(ErrorKind.ECC_ERROR, "gpt-a", rank=rank)
        scene.settle()
    isolated = [n for n in scene.state.nodes.values() if n.status is NodeStatus.QUARANTINED]
    assert len(isolated) == 2
    scene.fail(ErrorKind.ECC_ERROR, "gpt-a", rank=0)
    tripped = scene.decide()
    assert isinstance(tripped, TripBreaker)
    scene.note(tripped)
    respond = scene.decide()
    assert (respond.kind, respond.quarantine) == (PlanKind.RESTART, {})
    assert "breaker" in respond.reason


def test_a_users_bug_stops_the_job_and_frees_its_gpus():
    scene = running_pair()
    scene.fail(ErrorKind.USER_ERROR, "gpt-b")
    scene.settle()
    job = scene.state.jobs["gpt-b"]
    assert (job.status, job.gpus) == (JobStatus.FAILED, 0)
    assert "it broke" in job.reason
    assert scene.state.jobs["gpt-a"].gpus == 8


def test_a_failure_during_a_recovery_replans_it_once():
    scene = running_pair()
    scene.lose(scene.state.jobs["gpt-a"].assignment.nodes[-1])
    first = scene.plan(scene.decide())
    scene.step(first.id)
    scene.lose(scene.state.jobs["gpt-b"].assignment.nodes[-1])
    respond = scene.decide()
    assert respond.supersedes == first.id
    assert set(first.incidents) < set(respond.incidents)
    scene.plan(respond)
    scene.settle()
    finished = [p for p in scene.state.plans.values() if p.finished_at and set(first.incidents) & set(p.plan.incidents)]
    assert len(finished) == 1
    assert sum(job.gpus for job in scene.state.jobs.values()) == 4


def test_an_unrelated_failure_does_not_disturb_a_plan_under_way():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a")
    plan = scene.plan(scene.decide())
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-b")
    assert scene.decide() == Continue(plan=plan.id, reason=f"plan {plan.id} is under way")
    scene.settle()
    assert not scene.state.open_incidents


def test_a_node_that_came_back_unnoticed_counts_as_lost_first():
    scene = running_pair()
    node = scene.state.jobs["gpt-a"].assignment.nodes[0]
    scene.join(node)
    kinds = {incident.kind for incident in scene.state.open_incidents}
    assert kinds == {ErrorKind.NODE_LOST, "node_joined"}
    scene.settle()
    assert {name: job.gpus for name, job in scene.state.jobs.items()} == {"gpt-a": 4, "gpt-b": 4}


def test_a_lost_node_reported_twice_is_one_incident():
    scene = running_pair()
    scene.lose("node-1")
    (before,) = scene.state.open_incidents
    scene.lose("node-1")
    assert scene.state.open_incidents == (replace(before, count=2),)


def test_cancelling_frees_the_gpus():
    scene = running_pair()
    submission = scene.state.jobs["gpt-b"].submission
    scene.tell(JobCancelled(id="cancel", at=scene.now, job="gpt-b", submission=submission))
    scene.settle()
    assert (scene.state.jobs["gpt-b"].status, scene.state.jobs["gpt-b"].gpus) == (JobStatus.CANCELLED, 0)
    assert scene.state.jobs["gpt-a"].gpus == 8


def test_too_few_gpus_pause_the_cheaper_job_until_they_return():
    scene = running_pair()
    for node in ("node-1", "node-2", "node-3"):
        scene.lose(node)
        scene.settle()
    assert (scene.state.jobs["gpt-a"].gpus, scene.state.jobs["gpt-b"].gpus) == (2, 0)
    assert scene.state.jobs["gpt-b"].status is JobStatus.QUEUED
    scene.lose("node-4")
    scene.settle()
    assert all(job.status is JobStatus.QUEUED for job in scene.state.jobs.values())
    for number in range(1, 5):
        scene.join(f"node-{number}")
    scene.settle()
    assert {name: job.gpus for name, job in scene.state.jobs.items()} == {"gpt-a": 4, "gpt-b": 4}


def test_a_step_that_nobody_decided_is_refused_with_its_story():
    with pytest.raises(IllegalTransition, match="no such step was ever decided"):
        running_pair().tell(StepCompleted(id="step-x", at=1, plan="plan-x"))


def test_a_second_plan_beside_the_one_under_way_is_refused():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a")
    plan = scene.plan(scene.decide())
    with pytest.raises(IllegalTransition, match="under way"):
        scene.tell(PlanDecided(id="other", at=1, plan=plan))


def test_every_launch_comes_after_every_stop():
    scene = running_pair()
    scene.lose(scene.state.jobs["gpt-a"].assignment.nodes[-1])
    kinds = [step.kind for step in scene.plan(scene.decide()).steps]
    assert kinds.index(StepKind.LAUNCH) > max(i for i, kind in enumerate(kinds) if kind is StepKind.STOP)


def stale_plan(scene, meanwhile):
    """The plan that was being made while `meanwhile` happened."""
    respond, before = scene.decide(), scene.state
    meanwhile()
    now, scene.state = scene.state, before
    plan = scene.plan(respond)
    scene.state = now
    return PlanDecided(id=plan.id, at=scene.now, plan=plan)


def cancel(scene, job):
    submission = scene.state.jobs[job].submission
    scene.tell(JobCancelled(id=scene.new_id("cancel"), at=scene.now, job=job, submission=submission))


def test_a_job_cancelled_while_its_plan_was_made_stays_cancelled():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-b")
    overtaken = stale_plan(scene, lambda: cancel(scene, "gpt-b"))
    with pytest.raises(IllegalTransition, match=r"by now|cancelled"):
        scene.tell(overtaken)
    scene.settle()
    assert scene.state.jobs["gpt-b"].status is JobStatus.CANCELLED


def test_an_answer_that_comes_after_the_incident_was_closed_is_refused():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a")
    overtaken = stale_plan(scene, scene.settle)
    with pytest.raises(IllegalTransition, match="closed by now"):
        scene.tell(overtaken)


def test_a_plan_for_an_incident_that_was_merged_meanwhile_is_refused():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a")
    node = scene.state.jobs["gpt-a"].assignment.nodes[0]
    overtaken = stale_plan(scene, lambda: scene.lose(node))
    with pytest.raises(IllegalTransition, match="merged by now"):
        scene.tell(overtaken)
    scene.settle()


def test_the_first_crash_of_a_job_is_not_raised_even_before_its_first_iteration():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", iteration=-1)
    respond = scene.decide()
    assert (respond.kind, respond.quarantine) == (PlanKind.RESTART, {})


@pytest.mark.parametrize("kind", [ErrorKind.LOSS_ANOMALY, ErrorKind.STORAGE_ERROR])
def test_no_node_is_isolated_for_what_is_not_its_fault(kind):
    scene = running_pair()
    for _ in range(6):
        scene.fail(kind, "gpt-a", iteration=3)
        scene.settle()
        if scene.state.jobs["gpt-a"].status is JobStatus.FAILED:
            break
    assert scene.state.jobs["gpt-a"].status is JobStatus.FAILED
    assert all(node.status is NodeStatus.READY for node in scene.state.nodes.values())


def test_one_jobs_spent_budget_does_not_stop_another_on_the_same_node():
    scene = Scene()
    scene.join("node-1", num_gpus=8)
    scene.join("node-2", num_gpus=8)
    scene.submit("gpt-a", max_gpus=4, weight=2.0)
    scene.submit("gpt-b", max_gpus=4)
    scene.settle()
    shared = scene.state.jobs["gpt-a"].nodes & scene.state.jobs["gpt-b"].nodes
    assert shared
    for _ in range(3):
        scene.fail(ErrorKind.LOSS_ANOMALY, "gpt-a", iteration=3)
        scene.settle()
    failure = Failure(
        id="ecc",
        kind=ErrorKind.ECC_ERROR,
        method=DetectionMethod.NODE_HEALTH,
        seen_at=scene.now,
        node=min(shared),
        boot=scene.state.nodes[min(shared)].boot,
    )
    scene.tell(FailureDetected(id="ecc", at=scene.now, failure=failure))
    respond = scene.decide()
    assert (respond.stop, set(respond.quarantine)) == ({}, {min(shared)})


def test_a_quarantine_survives_a_new_agent_and_ends_when_the_node_is_released():
    scene = running_pair()
    failure = scene.fail(ErrorKind.ECC_ERROR, "gpt-a")
    scene.settle()
    scene.join(failure.node)
    scene.settle()
    assert scene.state.nodes[failure.node].status is NodeStatus.QUARANTINED
    assert sum(job.gpus for job in scene.state.jobs.values()) == 6
    scene.tell(NodeReleased(id="released", at=scene.now, node=failure.node))
    scene.settle()
    assert sum(job.gpus for job in scene.state.jobs.values()) == 8


def test_two_lost_nodes_are_two_incidents_and_one_plan():
    scene = running_pair()
    first, second = scene.state.jobs["gpt-a"].assignment.nodes
    scene.lose(first)
    scene.lose(second)
    assert {(it.kind, it.node) for it in scene.state.open_incidents} == {("node_lost", first), ("node_lost", second)}
    assert len(scene.decide().incidents) == 2


def test_a_clock_that_is_set_back_holds_nothing_up():
    scene = running_pair()
    scene.fail(ErrorKind.CONNECTION_RESET, "gpt-a")
    scene.now -= 3600
    assert scene.decide().kind is PlanKind.REATTEMPT


def test_an_injected_fault_is_the_zero_of_one_incident_only():
    scene = running_pair()
    scene.tell(FaultInjected(id="fault", at=scene.now - 0.5, kind="crash", target="gpt-a/1"))
    scene.fail(ErrorKind.CONNECTION_RESET, "gpt-a", rank=0)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1)
    (incident,) = scene.state.open_incidents
    assert timing(scene.state, incident).detection_s == pytest.approx(0.5)
    scene.settle()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=1)
    (later,) = scene.state.open_incidents
    assert timing(scene.state, later).detection_s is None


def test_a_planned_change_waits_for_the_verdict_on_a_silent_node():
    scene = running_pair()
    scene.suspect("node-1")
    scene.finish("gpt-b")
    scene.now += 2
    assert isinstance(scene.decide(), Wait)
