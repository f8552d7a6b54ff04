"""A rank that stands still: patience, culprits, and hangs that are over by themselves."""

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Respond, Rest, Wait
from unicron_lib.domain.cluster import MAX_FAILURES, IncidentStatus
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
        scene.all_resume("gpt-a")
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
    scene.all_resume("gpt-a")
    assert not scene.state.open_incidents


@pytest.mark.parametrize("first", [0, 1, 2, 3], ids=["waits", "hangs", "waits too", "waits as well"])
def test_a_hang_is_over_when_no_rank_stands_still_any_more(first):
    """A rank of another group that goes on, or even the culprit, says nothing of those that still wait."""
    scene = running_pair()
    hang(scene, culprit=1)
    for left, rank in zip((4, 3, 2, 1), sorted(range(4), key=lambda rank: rank != first), strict=True):
        (incident,) = scene.state.open_incidents
        assert len(incident.failures) == left
        scene.resume("gpt-a", rank)
    assert not scene.state.open_incidents


def test_those_that_waited_for_a_rank_that_goes_on_get_as_much_time_again():
    scene = running_pair()
    hang(scene, culprit=1)
    scene.now += 4.9
    scene.resume("gpt-a", 1)
    scene.now += 0.2
    assert isinstance(scene.decide(), Wait)
    scene.now += 5.0
    assert scene.decide().kind is PlanKind.REATTEMPT, "they still wait: for what?"


def test_every_stalled_rank_of_a_large_job_is_watched():
    """More ranks than failures are kept of an incident: as long as one stands still, the hang is not over."""
    scene = Scene()
    scene.join("node-1", num_gpus=MAX_FAILURES + 40)
    size = MAX_FAILURES + 36
    scene.submit("gpt-a", min_gpus=size, max_gpus=size, throughput_flops={size: 1e9}, global_batch_size=size)
    scene.settle()
    for rank in range(size):
        scene.stall("gpt-a", rank, WAITING)
    for rank in reversed(range(size)):
        assert scene.state.open_incidents
        scene.resume("gpt-a", rank)
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
