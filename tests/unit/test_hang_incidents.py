"""A rank that stands still: patience, culprits, and hangs that are over by themselves."""

import pytest
from scenes import running_pair

from unicron_lib.domain.actions import Respond, Rest, Wait
from unicron_lib.domain.cluster import IncidentStatus
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import PlanKind
from unicron_lib.report import incident_markdown

HANG, WAITING = ErrorKind.TASK_HANG, ErrorKind.NCCL_TIMEOUT


def hang(scene, culprit=1):
    """One rank hangs, the others wait for it, and are told first."""
    scene.now += 10
    for rank in range(4):
        if rank != culprit:
            scene.stall("gpt-a", rank, WAITING)
    return scene.stall("gpt-a", culprit)


def test_the_culprit_is_the_rank_that_did_not_enter_the_collective():
    scene = running_pair()
    failure = hang(scene)
    (incident,) = scene.state.open_incidents
    assert (incident.root, incident.kind, incident.count) == (failure, HANG, 4)
    waiting = scene.decide()
    assert isinstance(waiting, Wait)
    assert waiting.until == pytest.approx(failure.not_before)
    assert "may go on" in incident_markdown(scene.state, incident.id)
    scene.now = waiting.until
    respond = scene.decide()
    assert (respond.kind, respond.faulted) == (PlanKind.RESTART, ("gpt-a",))
    assert "gpt-a rank 1" in respond.reason


def test_a_hang_that_is_over_by_itself_is_closed_and_counts_for_nothing():
    scene = running_pair()
    before = scene.state
    for _ in range(6):
        hang(scene)
        scene.now += 2
        scene.resume("gpt-a", 1)
        assert scene.decide() == Rest()
    job = scene.state.jobs["gpt-a"]
    assert (job.stuck_restarts, job.failed_times, job.generation) == (0, (), before.jobs["gpt-a"].generation)
    assert scene.state.plans == before.plans
    over = [it for it in scene.state.incidents.values() if it.is_failure]
    assert {it.status for it in over} == {IncidentStatus.CLOSED}
    assert "went on by itself after 2.0 s" in incident_markdown(scene.state, over[-1].id)


def test_one_of_two_culprits_that_goes_on_leaves_the_other():
    scene = running_pair()
    hang(scene, culprit=1)
    scene.stall("gpt-a", 3)
    scene.resume("gpt-a", 1)
    (incident,) = scene.state.open_incidents
    assert incident.root.rank == 3
    scene.resume("gpt-a", 3)
    assert not scene.state.open_incidents


def test_ranks_that_all_wait_are_tried_again_where_they_are():
    scene = running_pair()
    scene.now += 10
    for rank in range(4):
        scene.stall("gpt-a", rank, WAITING)
    scene.now += 4.9
    assert isinstance(scene.decide(), Wait)
    scene.now += 0.2
    assert scene.decide().kind is PlanKind.REATTEMPT


def test_a_rank_that_died_is_not_waited_for():
    scene = running_pair()
    hang(scene)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=2)
    respond = scene.decide()
    assert isinstance(respond, Respond)
    assert "gpt-a rank 2" in respond.reason
    scene.resume("gpt-a", 1)
    assert scene.state.open_incidents, "the dead rank has not gone on"


def test_what_was_decided_already_is_carried_out():
    scene = running_pair()
    hang(scene)
    scene.now += 5.1
    plan = scene.plan(scene.decide())
    scene.resume("gpt-a", 1)
    assert scene.state.active_plan.plan == plan


def test_a_clock_of_the_observer_that_is_ahead_holds_nothing_up():
    scene = running_pair()
    ahead = scene.now + 3600
    scene.fail(HANG, "gpt-a", rank=1, not_before=ahead)
    scene.now += 3601
    assert scene.decide().kind is PlanKind.RESTART
    scene = running_pair()
    scene.stall("gpt-a", 1, patience_s=5.0)
    scene.now -= 3600
    assert scene.decide().kind is PlanKind.RESTART


def test_a_stall_of_another_generation_is_not_over_when_this_one_goes_on():
    scene = running_pair()
    hang(scene)
    scene.now += 5.1
    scene.plan(scene.decide())
    scene.settle()
    before = scene.state.incidents
    scene.resume("gpt-b")
    assert scene.state.incidents == before
