"""What a person does about a breaker that has tripped: allow what it held back, call it a false alarm, isolate by hand."""

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Respond, Rest, TripBreaker
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import BreakerReset, NodeQuarantined, NodeReleased
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import PlanKind
from unicron_lib.report import incident_markdown

BROKEN = ("node-1", "node-2", "node-3")


def tripped(nodes=BROKEN):
    """The breaker has tripped over most of four nodes, and what was told of them is dismissed."""
    scene = running_pair()
    for node in nodes:
        scene.fault(ErrorKind.GPU_LOST, node)
    scene.settle()
    assert scene.state.breaker_since is not None
    assert isolated(scene) == set()
    scene.now += 600
    return scene


def reset(scene, **keys):
    scene.tell(BreakerReset(id=scene.new_id("reset"), at=scene.now, **keys))


def isolated(scene):
    return {node.id for node in scene.state.nodes.values() if node.status is NodeStatus.QUARANTINED}


def by_hand(scene, node):
    told = NodeQuarantined(id=scene.new_id("by hand"), at=scene.now, node=node, reason="isolated by a person: it is noisy")
    scene.tell(told)


def test_what_the_breaker_held_back_happens_once_a_person_has_looked():
    scene = tripped()
    reset(scene)
    respond = scene.decide()
    assert isinstance(respond, Respond), "a person has allowed it: it does not trip again"
    assert set(respond.quarantine) == set(BROKEN)
    assert {scene.state.incidents[name].opened_at for name in respond.incidents} == {scene.now}
    scene.settle()
    assert isolated(scene) == set(BROKEN)
    assert all(job.nodes <= {"node-4"} for job in scene.state.jobs.values())


def test_what_a_person_has_allowed_is_not_in_the_share_of_the_next_one():
    scene = tripped()
    reset(scene)
    scene.settle()
    scene.fault(ErrorKind.GPU_LOST, "node-4")
    assert set(scene.decide().quarantine) == {"node-4"}


def test_more_of_them_at_once_trip_it_again_and_those_allowed_are_isolated_nevertheless():
    scene = running_pair()
    for number in range(5, 9):
        scene.join(f"node-{number}")
    scene.settle()
    for node in (*BROKEN, "node-4", "node-5"):
        scene.fault(ErrorKind.GPU_LOST, node)
    scene.settle()
    boots = {node.id: node.boot for node in scene.state.nodes.values()}
    scene.now += 600
    scene.join("node-4")
    scene.join("node-5")
    scene.settle()
    assert scene.state.nodes["node-5"].boot != boots["node-5"]
    reset(scene)
    for node in ("node-4", "node-5", "node-6", "node-7", "node-8"):
        scene.fault(ErrorKind.ECC_ERROR, node)
    again = scene.decide()
    assert isinstance(again, TripBreaker)
    scene.settle()
    assert isolated(scene) == set(BROKEN)


def test_a_false_alarm_is_forgotten():
    scene = tripped()
    reset(scene, false_alarm=True)
    assert scene.decide() == Rest()
    scene.settle()
    reset(scene)
    assert scene.decide() == Rest()
    assert isolated(scene) == set()


@pytest.mark.parametrize("what", ["a new life", "lost", "isolated by hand", "isolated and released"])
def test_what_is_no_longer_true_is_not_opened_again(what):
    scene = tripped()
    if what == "a new life":
        scene.join("node-1")
    elif what == "lost":
        scene.lose("node-1")
    else:
        by_hand(scene, "node-1")
    scene.settle()
    if what == "isolated and released":
        scene.tell(NodeReleased(id="released", at=scene.now, node="node-1"))
        scene.settle()
    reset(scene)
    assert set(scene.decide().quarantine) == {"node-2", "node-3"}


def test_of_what_was_told_for_hours_the_newest_is_opened_again():
    scene = tripped()
    for _ in range(5):
        scene.now += 600
        scene.fault(ErrorKind.GPU_LOST, "node-1")
        scene.settle()
    reset(scene)
    assert sorted(str(it.node) for it in scene.state.open_incidents) == list(BROKEN)


def test_symptoms_that_were_dismissed_meanwhile_stay_so():
    scene = tripped()
    scene.fault(ErrorKind.ECC_ERROR, "node-4", symptom=True)
    scene.fault(ErrorKind.LINK_FLAPPING, "node-4")
    scene.settle()
    reset(scene)
    assert "node-4" not in {it.node for it in scene.state.open_incidents}


def test_a_node_that_a_person_isolates_is_left_by_its_jobs_whatever_the_breaker_says():
    scene = tripped()
    by_hand(scene, "node-4")
    assert not any(it.is_failure for it in scene.state.open_incidents), "nothing has failed"
    scene.settle()
    assert isolated(scene) == {"node-4"}
    assert not any("node-4" in job.nodes for job in scene.state.jobs.values())
    assert "it is noisy" in scene.state.nodes["node-4"].reason
    assert all((job.failed_times, job.stuck_restarts) == ((), 0) for job in scene.state.jobs.values())


def test_what_a_person_isolates_does_not_trip_the_breaker():
    scene = running_pair()
    by_hand(scene, "node-1")
    by_hand(scene, "node-2")
    by_hand(scene, "node-5")
    scene.settle()
    scene.fault(ErrorKind.GPU_LOST, "node-3")
    assert set(scene.decide().quarantine) == {"node-3"}


def test_the_only_node_is_isolated_when_it_is_broken():
    scene = Scene()
    scene.join("solo")
    scene.submit("gpt-a")
    scene.settle()
    scene.fault(ErrorKind.GPU_LOST, "solo")
    assert set(scene.decide().quarantine) == {"solo"}


def test_nodes_that_are_long_gone_are_no_part_of_the_whole():
    scene = running_pair()
    for number in range(12):
        scene.join(f"old-{number}")
    scene.settle()
    for number in range(12):
        scene.lose(f"old-{number}")
        scene.settle()
        scene.now += 60
    scene.now += 86400
    for number in range(1, 5):
        scene.fault(ErrorKind.GPU_LOST, f"node-{number}")
        scene.settle()
    assert isolated(scene) == {"node-1", "node-2"}
    assert scene.state.breaker_since is not None


@pytest.mark.parametrize(("lost", "apart_s", "trips"), [(3, 0.5, True), (2, 0.0, False), (3, 3.0, False)])
def test_most_of_the_nodes_lost_at_once_is_told_to_a_person(lost, apart_s, trips):
    scene = running_pair()
    for number in range(1, lost + 1):
        scene.lose(f"node-{number}")
        scene.now += apart_s
    action = scene.decide()
    assert isinstance(action, TripBreaker) is trips
    if trips:
        assert "3 of 4 nodes were lost within 5 s (node-1, node-2, node-3)" in action.reason
        scene.note(action)
        assert scene.state.breaker_reason == action.reason
    respond = scene.decide()
    assert respond.kind is PlanKind.REALLOCATE, "lost is lost"
    scene.settle()
    reset(scene)
    scene.settle()
    assert scene.state.breaker_since is None


def test_the_report_of_what_was_held_back_names_the_breaker_and_then_the_answer():
    scene = tripped()
    name = next(it.id for it in scene.state.incidents.values() if it.held)
    assert "the breaker allows no further isolation" in incident_markdown(scene.state, name)
    reset(scene)
    assert "breaker" not in incident_markdown(scene.state, name)
