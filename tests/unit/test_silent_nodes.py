"""A node that is silent and not lost, since its ranks are seen to step: for how long the others wait, and what it keeps."""

import pytest
from scenes import TABLE, Scene, running_pair

from unicron_lib.domain.actions import Respond, Rest, Wait
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import NodeCleared
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.judging import DEFAULT_POLICY
from unicron_lib.domain.plans import Slot
from unicron_lib.simulation.invariants import broken


def two_jobs():
    """A pair of jobs, and a node of the first that is silent."""
    scene = running_pair()
    silent = min(scene.state.jobs["gpt-a"].nodes)
    scene.suspect(silent)
    return scene, silent


def clear(scene, node):
    boot = scene.state.nodes[node].boot
    scene.tell(NodeCleared(id=scene.new_id("cleared"), at=scene.now, node=node, boot=boot))


def answered(scene):
    """The plan that is due now, and carried out; its invariants hold."""
    respond, before = scene.decide(), scene.state
    assert isinstance(respond, Respond)
    plan = scene.plan(respond)
    assert broken(before, scene.events[-1], scene.state) is None
    while scene.step(plan.id):
        pass
    return plan


@pytest.mark.parametrize("what", ["a node of the other job is lost", "the other job is over", "a job is submitted"])
def test_others_wait_for_its_verdict_but_not_for_ever(what):
    scene, silent = two_jobs()
    before = scene.state.jobs["gpt-a"]
    if what == "a node of the other job is lost":
        scene.lose(max(scene.state.jobs["gpt-b"].nodes))
    elif what == "the other job is over":
        scene.finish("gpt-b")
    else:
        scene.submit("gpt-c")
    scene.now += DEFAULT_POLICY.suspect_s - 0.1
    waiting = scene.decide()
    assert isinstance(waiting, Wait)
    assert silent in waiting.reason
    scene.now += 0.2
    plan = answered(scene)
    assert scene.state.jobs["gpt-a"] == before, "its ranks are left where they are"
    assert plan.gpus["gpt-a"] == 4
    assert "gpt-a stays as it is" in plan.reason
    assert scene.state.nodes[silent].status is NodeStatus.SUSPECT
    scene.settle()


def test_no_new_ranks_go_to_a_silent_node_nor_beside_the_ranks_that_are_kept():
    scene = Scene()
    for number in range(1, 5):
        scene.join(f"node-{number}", num_gpus=4)
    scene.submit("gpt-a", min_gpus=6, max_gpus=6, throughput_flops={6: 3e9})
    scene.settle()
    (full, partly) = scene.state.jobs["gpt-a"].assignment.nodes
    scene.suspect(full)
    scene.submit("gpt-b", min_gpus=2, max_gpus=8, throughput_flops=TABLE)
    scene.now += 7
    answered(scene)
    slots = scene.state.jobs["gpt-b"].assignment.slots
    assert len(slots) == 8
    assert not {slot.node for slot in slots} & {full, partly}


def test_two_jobs_on_one_node_are_kept_together():
    scene = Scene()
    for number in range(1, 4):
        scene.join(f"node-{number}", num_gpus=4)
    for job in ("gpt-a", "gpt-b"):
        scene.submit(job, min_gpus=6, max_gpus=6, throughput_flops={6: 3e9})
    scene.settle()
    a, b = scene.state.jobs["gpt-a"], scene.state.jobs["gpt-b"]
    assert a.nodes & b.nodes
    scene.suspect(min(a.nodes - b.nodes))
    scene.submit("gpt-c")
    scene.now += 7
    answered(scene)
    assert (scene.state.jobs["gpt-a"], scene.state.jobs["gpt-b"]) == (a, b)


def test_a_job_on_it_that_fails_is_moved_off_it():
    scene, silent = two_jobs()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank=3)
    assert isinstance(scene.decide(), Wait)
    scene.now += DEFAULT_POLICY.suspect_s
    answered(scene)
    assert silent not in scene.state.jobs["gpt-a"].nodes
    assert all(job.gpus for job in scene.state.jobs.values())


def test_when_it_is_heard_again_its_gpus_are_shared_out_again():
    scene, silent = two_jobs()
    scene.finish("gpt-b")
    scene.now += 7
    answered(scene)
    assert scene.state.jobs["gpt-a"].gpus == 4
    clear(scene, silent)
    scene.now += 2
    answered(scene)
    assert scene.state.jobs["gpt-a"].gpus == 8
    assert scene.decide() == Rest()


def test_a_silence_without_consequences_leaves_nothing_to_do():
    scene, silent = two_jobs()
    scene.now += 60
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-b")
    scene.settle()
    clear(scene, silent)
    assert scene.decide() == Rest()


def test_a_silent_node_with_broken_hardware_is_left_once_the_wait_is_over():
    scene, silent = two_jobs()
    scene.fault(ErrorKind.GPU_LOST, silent)
    assert isinstance(scene.decide(), Wait)
    scene.now += DEFAULT_POLICY.suspect_s
    plan = answered(scene)
    assert set(plan.quarantined) == {silent}
    assert Slot(silent, 0) not in scene.state.jobs["gpt-a"].assignment.slots


def test_in_a_cluster_of_pools_it_is_the_same():
    scene = Scene()
    for number in range(1, 7):
        scene.join(f"node-{number}")
    for job in ("gpt-a", "gpt-b"):
        scene.submit(job, max_gpus=4, throughput_flops={}, throughput_by_pool={"": TABLE})
    scene.settle()
    before = scene.state.jobs["gpt-a"]
    scene.suspect(min(before.nodes))
    scene.lose(max(scene.state.jobs["gpt-b"].nodes))
    scene.now += 7
    answered(scene)
    assert scene.state.jobs["gpt-a"] == before
    assert not scene.state.jobs["gpt-b"].nodes & before.nodes
    assert scene.state.jobs["gpt-b"].gpus == 4
