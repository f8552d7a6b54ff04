"""What would end a job for good is not done before whatever explains it better could be told."""

import pytest
from scenes import running_pair

from unicron_lib.domain.actions import Wait
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.failures import DetectionMethod, ErrorKind
from unicron_lib.domain.jobs import JobStatus
from unicron_lib.domain.judging import DEFAULT_POLICY
from unicron_lib.domain.plans import PlanKind
from unicron_lib.report import incident_markdown

LAST_WORD_S = DEFAULT_POLICY.last_word_s


def node_of(scene, rank):
    return scene.state.jobs["gpt-a"].assignment.slots[rank].node


def test_a_users_error_ends_the_job_only_when_nothing_better_was_told():
    scene = running_pair()
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=1)
    (incident,) = scene.state.open_incidents
    waiting = scene.decide()
    assert isinstance(waiting, Wait)
    assert waiting.until == scene.now + LAST_WORD_S
    assert "ends the job for good" in waiting.reason
    assert "may still explain it" in incident_markdown(scene.state, incident.id)
    scene.now = waiting.until
    assert set(scene.decide().stop) == {"gpt-a"}


@pytest.mark.parametrize("keys", [{}, {"verdict": "stop"}])
def test_hardware_that_is_told_a_moment_later_explains_it(keys):
    scene = running_pair()
    failure = scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=1, **keys)
    scene.now += LAST_WORD_S - 0.1
    scene.fault(ErrorKind.ECC_ERROR, failure.node)
    respond = scene.decide()
    assert (respond.stop, set(respond.quarantine)) == ({}, {failure.node})
    scene.settle()
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING
    assert scene.state.nodes[failure.node].status is NodeStatus.QUARANTINED


def test_a_node_that_is_lost_a_moment_later_explains_it():
    scene = running_pair()
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=0)
    scene.now += 1
    scene.suspect(node_of(scene, 3))
    scene.now += 3
    assert isinstance(scene.decide(), Wait)
    scene.lose(node_of(scene, 3))
    assert scene.decide().stop == {}
    scene.settle()
    assert scene.state.jobs["gpt-a"].status is JobStatus.RUNNING


def test_hardware_that_another_rank_tells_of_explains_it_even_later():
    scene = running_pair()
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=0)
    scene.now += 1
    node = scene.fail(ErrorKind.ECC_ERROR, "gpt-a", rank=3).node
    respond = scene.decide()
    assert (respond.stop, set(respond.quarantine)) == ({}, {node})


@pytest.mark.parametrize("skew_s", [-3600.0, -0.5, 0.0, 3600.0])
def test_between_nodes_what_the_journal_took_first_came_first_whatever_their_clocks_say(skew_s):
    scene = running_pair()
    assert node_of(scene, 0) != node_of(scene, 3)
    killed = scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=0, method=DetectionMethod.PROCESS)
    scene.now += 0.1
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=3, seen_at=scene.now + skew_s)
    (incident,) = scene.state.open_incidents
    assert incident.root == killed
    assert scene.decide().kind is PlanKind.RESTART


def test_within_a_node_its_clock_says_what_came_first():
    scene = running_pair()
    assert node_of(scene, 0) == node_of(scene, 1)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=0)
    first = scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=1, seen_at=scene.now - 0.2)
    (incident,) = scene.state.open_incidents
    assert incident.root == first


def test_ranks_that_end_because_of_a_users_error_do_not_excuse_it():
    scene = running_pair()
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=0)
    for rank in (1, 2, 3):
        scene.now += 0.2
        scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=rank)
    scene.now += LAST_WORD_S
    assert set(scene.decide().stop) == {"gpt-a"}


def test_what_was_told_before_two_incidents_became_one_is_still_first():
    scene = running_pair()
    scene.fault(ErrorKind.OTHER, node_of(scene, 0), symptom=True)
    first = scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=0)
    scene.fault(ErrorKind.LINK_FLAPPING, node_of(scene, 3))
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=3)
    roots = [it.root for it in scene.state.open_incidents if it.root and it.root.job]
    assert roots == [first]


def test_during_a_transition_it_is_held_as_well():
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=0)
    plan = scene.plan(scene.decide())
    scene.step(plan.id)
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", rank=1)
    assert scene.decide().plan == plan.id
    scene.now += LAST_WORD_S
    assert (set(scene.decide().stop), scene.decide().supersedes) == ({"gpt-a"}, plan.id)


def test_a_clock_that_is_set_back_does_not_hold_it():
    scene = running_pair()
    scene.fail(ErrorKind.USER_ERROR, "gpt-a")
    scene.now -= 3600
    assert set(scene.decide().stop) == {"gpt-a"}
