"""A first start waits for a check of the nodes without ranks, if that is asked for, for a limited time. Nothing else does."""

from dataclasses import replace

import pytest
from scenes import Scene

from unicron_lib.domain.actions import Respond, Wait
from unicron_lib.domain.checked import LaunchChecked, NodesChecked
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.judging import Policy
from unicron_lib.domain.launch_checks import FRESH_S, check_before_launch
from unicron_lib.domain.recovery import decide

LIMIT_S = 100.0
POLICY = Policy(launch_check_s=LIMIT_S)
LATER_S = 2.0
"""When no more changes are expected."""


@pytest.fixture
def scene() -> Scene:
    """One job on node-1 and node-2; node-3 and node-4 have been there for a while, without ranks."""
    scene = Scene()
    for number in (1, 2):
        scene.join(f"node-{number}")
    scene.submit("gpt-a", max_gpus=4)
    scene.settle()
    for number in (3, 4):
        scene.join(f"node-{number}")
    scene.settle()
    assert scene.state.jobs["gpt-a"].nodes == {"node-1", "node-2"}
    return scene


@pytest.fixture
def submitted(scene: Scene) -> Scene:
    """And a second job has been submitted, long enough ago."""
    scene.submit("gpt-b", max_gpus=4)
    scene.now += LATER_S
    return scene


def passed(scene: Scene, *names: str) -> None:
    boots = {name: scene.state.nodes[name].boot for name in names}
    scene.tell(NodesChecked(id=scene.new_id("passed"), at=scene.now, passed=boots))


def answer(scene: Scene):
    return decide(scene.state, scene.now, POLICY)


def test_a_first_start_waits_for_the_nodes_without_ranks_and_says_so(submitted):
    action = answer(submitted)
    assert isinstance(action, Wait)
    assert action.reason == "node-3, node-4 are checked before gpt-b starts"
    assert action.until == submitted.now - LATER_S + LIMIT_S
    assert isinstance(submitted.decide(), Respond), "nobody waits who has not asked for it"


def test_once_the_check_is_over_the_plan_tells_what_it_found(submitted):
    check = check_before_launch(submitted.state, submitted.now, LIMIT_S)
    told = "2 of 2 nodes passed a check first"
    over = LaunchChecked(id="over", at=submitted.now, incidents=check.incidents, jobs=check.jobs, told=told)
    submitted.tell(over)
    action = answer(submitted)
    assert isinstance(action, Respond)
    assert f"job submitted: gpt-b ({told})" in action.reason


def test_a_check_that_nobody_finishes_is_waited_for_no_longer_than_the_limit(submitted):
    submitted.now += LIMIT_S
    assert isinstance(answer(submitted), Respond)


def test_a_clock_that_was_set_back_holds_nobody(submitted):
    submitted.now -= 10 * LATER_S
    assert isinstance(answer(submitted), Respond)


def test_nodes_that_have_passed_lately_are_not_checked_again(submitted):
    passed(submitted, "node-3", "node-4")
    assert isinstance(answer(submitted), Respond)
    state = submitted.state
    assert check_before_launch(state, submitted.now + FRESH_S + 1, 2 * FRESH_S).nodes == ("node-3", "node-4")


def test_one_that_is_due_meets_one_that_is_not(submitted):
    passed(submitted, "node-3")
    assert check_before_launch(submitted.state, submitted.now, LIMIT_S).nodes == ("node-4", "node-3")


def test_one_that_failed_since_or_whose_agent_is_new_is_checked_again(scene):
    passed(scene, "node-3", "node-4")
    scene.now += 1.0
    scene.fault(ErrorKind.LINK_FLAPPING, "node-3")
    scene.join("node-4")
    scene.submit("gpt-b", max_gpus=4)
    check = check_before_launch(scene.state, scene.now, LIMIT_S)
    assert set(check.nodes) == {"node-3", "node-4"}


def test_a_failure_of_a_job_waits_for_no_check(submitted):
    submitted.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 1)
    action = answer(submitted)
    assert isinstance(action, Respond)
    assert action.faulted == ("gpt-a",)


def test_a_lost_node_with_ranks_waits_for_no_check(submitted):
    submitted.lose("node-1")
    action = answer(submitted)
    assert isinstance(action, Respond)
    assert "gpt-a" in action.faulted


def test_what_the_check_finds_is_planned_around_when_the_check_is_over_and_not_before(submitted):
    """Of several faulty nodes, the first to be told must not have the job start on the second."""
    check = check_before_launch(submitted.state, submitted.now, LIMIT_S)
    submitted.fault(ErrorKind.NETWORK_ERROR, "node-3")
    assert isinstance(answer(submitted), Wait)
    submitted.tell(LaunchChecked(id="over", at=submitted.now, incidents=check.incidents, jobs=check.jobs, told="found"))
    submitted.now += LATER_S  # in which a cause of what it found could arrive
    action = answer(submitted)
    assert isinstance(action, Respond)
    assert set(action.quarantine) == {"node-3"}


def test_a_job_that_lost_its_gpus_waits_for_nothing(submitted):
    job = submitted.state.jobs["gpt-a"]
    submitted.state = submitted.state.with_job(replace(job, assignment=None))
    assert check_before_launch(submitted.state, submitted.now, LIMIT_S) is None


def test_a_job_with_a_pool_of_its_own_has_the_nodes_of_that_checked(scene):
    for name, pool in (("node-3", "a100"), ("node-4", "spot")):
        scene.state = scene.state.with_node(replace(scene.state.nodes[name], pool=pool))
    scene.submit("gpt-b", max_gpus=4, pool="spot")
    assert check_before_launch(scene.state, scene.now, LIMIT_S).nodes == ("node-4",)
