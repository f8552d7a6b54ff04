"""Nodes that come and go, notes about them, and slow ranks: told to people, acted on by nobody."""

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Rest
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import (
    NodeCleared,
    NodeJoined,
    NodeNoted,
    NodeReleased,
    NodeSettled,
    StragglerCleared,
    StragglerDetected,
)
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.flapping import LOSS_MEMORY_S, snooze_until


def rejoin(scene, node, snooze_s=600.0):
    """As the controller does it."""
    until = snooze_until(scene.state.nodes.get(node), scene.now, snooze_s=snooze_s)
    boot, name = scene.new_id("boot"), scene.new_id("join")
    scene.tell(
        NodeJoined(id=name, at=scene.now, node=node, boot=boot, address="a", num_gpus=2, snoozed_until=until),
    )
    return until


def flap(scene, node, times=2):
    until = 0.0
    for _ in range(times):
        scene.now += 20
        scene.lose(node)
        scene.settle()
        until = rejoin(scene, node)
        scene.settle()
    return until


def settled(scene, node):
    return NodeSettled(id=scene.new_id("settled"), at=scene.now, node=node, boot=scene.state.nodes[node].boot)


def test_a_node_that_comes_and_goes_gets_no_ranks_until_it_has_stayed():
    scene = running_pair()
    until = flap(scene, "node-4")
    node = scene.state.nodes["node-4"]
    assert (node.status, node.snoozed_until) == (NodeStatus.SNOOZED, until)
    assert "lost 2 times" in node.reason
    assert sum(job.gpus for job in scene.state.jobs.values()) == 6
    scene.now = until
    scene.tell(settled(scene, "node-4"))
    scene.settle()
    assert sum(job.gpus for job in scene.state.jobs.values()) == 8


def test_once_lost_is_not_flapping():
    scene = running_pair()
    assert flap(scene, "node-4", times=1) == 0.0
    assert sum(job.gpus for job in scene.state.jobs.values()) == 8


def test_losses_that_are_far_apart_are_not_flapping():
    scene = running_pair()
    flap(scene, "node-4", times=1)
    scene.now += 600
    assert flap(scene, "node-4", times=1) == 0.0
    assert len(scene.state.nodes["node-4"].losses) == 2
    scene.now += LOSS_MEMORY_S
    flap(scene, "node-4", times=1)
    assert len(scene.state.nodes["node-4"].losses) == 1


def test_snoozing_can_be_switched_off():
    scene = running_pair()
    flap(scene, "node-4")
    assert snooze_until(scene.state.nodes["node-4"], scene.now, snooze_s=0.0) == 0.0
    assert snooze_until(None, scene.now, snooze_s=600.0) == 0.0


def test_a_snoozed_node_that_is_lost_again_is_lost_and_its_old_snooze_means_nothing():
    scene = running_pair()
    flap(scene, "node-4")
    late = settled(scene, "node-4")
    scene.lose("node-4")
    assert scene.state.nodes["node-4"].status is NodeStatus.LOST
    scene.settle()
    assert rejoin(scene, "node-4") > scene.now
    scene.tell(late)
    assert scene.state.nodes["node-4"].status is NodeStatus.SNOOZED


def test_an_agent_that_restarts_too_fast_to_be_missed_is_flapping_as_well():
    scene = running_pair()
    for _ in range(2):
        rejoin(scene, "node-4")
        scene.settle()
    assert rejoin(scene, "node-4") > scene.now


def test_a_person_may_end_a_snooze():
    scene = running_pair()
    flap(scene, "node-4")
    scene.tell(NodeReleased(id="released", at=scene.now, node="node-4"))
    scene.settle()
    assert sum(job.gpus for job in scene.state.jobs.values()) == 8


def test_the_broken_hardware_of_a_snoozed_node_is_isolated():
    scene = running_pair()
    flap(scene, "node-4")
    scene.fault(ErrorKind.GPU_LOST, "node-4")
    scene.settle()
    assert scene.state.nodes["node-4"].status is NodeStatus.QUARANTINED


def test_outages_that_end_in_time_are_no_failures_however_many():
    """PB56: the store's side of it: silent five times and heard of again, no incident, no plan."""
    scene = running_pair()
    before = scene.state
    for _ in range(5):
        scene.suspect("node-1")
        scene.now += 40
        boot = scene.state.nodes["node-1"].boot
        scene.tell(NodeCleared(id=scene.new_id("cleared"), at=scene.now, node="node-1", boot=boot))
        assert scene.decide() == Rest()
        scene.now += 600
    assert (scene.state.incidents, scene.state.plans, scene.state.jobs) == (before.incidents, before.plans, before.jobs)


def note(scene, code, text="", *, active=True, boot=None):
    boot = boot or scene.state.nodes["node-1"].boot
    scene.tell(NodeNoted(id=scene.new_id("note"), at=scene.now, node="node-1", boot=boot, code=code, text=text, active=active))


def test_notes_of_a_node_are_kept_until_they_are_over_or_its_agent_starts_anew():
    scene = running_pair()
    note(scene, "gpu_hot", "GPU 1 at 92 C")
    note(scene, "gpu_blind", "the driver does not answer")
    note(scene, "gpu_hot", "GPU 1 at 95 C")
    note(scene, "xid", "of another life", boot="boot-0")
    assert scene.state.nodes["node-1"].notes == {"gpu_hot": "GPU 1 at 95 C", "gpu_blind": "the driver does not answer"}
    note(scene, "gpu_hot", active=False)
    assert set(scene.state.nodes["node-1"].notes) == {"gpu_blind"}
    assert scene.decide() == Rest()
    scene.join("node-1")
    assert scene.state.nodes["node-1"].notes == {}


def slow(scene, ratio, rank=3, generation=None):
    generation = scene.state.jobs["gpt-a"].generation if generation is None else generation
    told = StragglerDetected(
        id=scene.new_id("slow"),
        at=scene.now,
        job="gpt-a",
        generation=generation,
        ratio=ratio,
        reason="computes 0.30 s",
        rank=rank,
        node="node-2",
    )
    scene.tell(told)


def test_a_slow_rank_is_named_and_nothing_is_done_about_it():
    scene = running_pair()
    slow(scene, 1.5)
    slow(scene, 1.6)
    slow(scene, 1.2, rank=None)
    slow(scene, 9.9, rank=1, generation=0)
    assert scene.state.jobs["gpt-a"].stragglers == {
        "rank 3": "1.60x at node-2: computes 0.30 s",
        "job": "1.20x at node-2: computes 0.30 s",
    }
    assert scene.decide() == Rest()
    generation = scene.state.jobs["gpt-a"].generation
    scene.tell(StragglerCleared(id="cleared", at=scene.now, job="gpt-a", generation=generation, rank=3))
    assert set(scene.state.jobs["gpt-a"].stragglers) == {"job"}


def test_a_new_generation_has_no_stragglers_yet():
    scene = running_pair()
    slow(scene, 1.5)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a")
    scene.plan(scene.decide())
    assert scene.state.jobs["gpt-a"].stragglers == {}


@pytest.mark.parametrize("status", [NodeStatus.SNOOZED, NodeStatus.LOST, NodeStatus.QUARANTINED])
def test_only_ready_nodes_are_planned_with(status):
    scene = Scene()
    scene.join("node-1")
    node = scene.state.nodes["node-1"]
    assert scene.state.healthy_nodes == (node,)
    scene.lose("node-1")
    assert status is not NodeStatus.READY
    assert scene.state.healthy_nodes == ()
