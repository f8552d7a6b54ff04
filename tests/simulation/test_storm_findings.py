"""What storms have found and what has been mended since, each as the smallest scene that shows it."""

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.events import BreakerTripped, JobCancelled, JobFinished
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import STEP_ORDER, Plan, StepKind


def carry_out(scene: Scene, plan: Plan, *, up_to: StepKind) -> None:
    """All steps before those of the kind `up_to` are done."""
    for _ in range(sum(STEP_ORDER.index(step.kind) < STEP_ORDER.index(up_to) for step in plan.steps)):
        scene.step(plan.id)


def planned(scene: Scene) -> Plan:
    action = scene.decide()
    assert isinstance(action, Respond), action
    return scene.plan(action)


def stops(plan: Plan) -> set[str]:
    """The nodes on which the plan ends older ranks."""
    return {node for step in plan.steps if step.kind is StepKind.STOP for node in step.nodes}


def test_ranks_that_a_superseded_plan_may_have_launched_are_stopped_by_whoever_comes_after() -> None:
    """Storm 34: restarted on its nodes, then moved off one, then moved again before anything had been stopped there."""
    scene = running_pair()
    first, *others = sorted(scene.state.jobs["gpt-a"].nodes)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 0)
    carry_out(scene, planned(scene), up_to=StepKind.LAUNCH)
    # its LAUNCH begins: ranks of the new generation live on `first`, and the journal cannot know
    scene.fault(ErrorKind.ECC_ERROR, first)
    assert first in stops(planned(scene))
    scene.lose(others[0])
    assert first in stops(planned(scene))


def test_a_job_that_fails_again_and_again_does_not_keep_another_ones_failure_waiting() -> None:
    """The breaker has tripped, so the job that fails is restarted in place, and each answer is superseded by the next."""
    scene = running_pair()
    scene.tell(BreakerTripped(id="tripped", at=scene.now, reason="a person has to look"))
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 0)
    plan = planned(scene)
    (_, node) = sorted(scene.state.jobs["gpt-b"].nodes)
    scene.lose(node)
    (lost,) = [incident.id for incident in scene.state.open_incidents]
    for _ in range(3):
        carry_out(scene, plan, up_to=StepKind.RESUME)
        scene.now += 2.0
        scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 0)
        plan = planned(scene)
    assert lost in plan.incidents


def test_ranks_that_have_learned_from_a_wrong_batch_do_not_live_on_when_the_way_back_is_interrupted() -> None:
    """Storm 118: RESTORE had chosen the earlier checkpoint, and not all ranks had been stopped, when another node was lost."""
    scene = running_pair()
    scene.fail(ErrorKind.LOSS_ANOMALY, "gpt-a", 0, iteration=45, spoiled=(41, 45))
    plan = planned(scene)
    assert "gpt-a" in plan.rewinds
    carry_out(scene, plan, up_to=StepKind.LAUNCH)
    scene.lose(min(scene.state.jobs["gpt-a"].nodes))
    scene.now += 2.0
    again = planned(scene)
    assert not [step.hold for step in again.steps if step.job == "gpt-a" and step.hold]
    assert scene.state.jobs["gpt-a"].rolled_back_to == 40, "nor is a later checkpoint gone on from"
    carry_out(scene, again, up_to=StepKind.RESUME)
    assert scene.state.jobs["gpt-a"].rolled_back_to is None


def resubmitted_under_way(up_to: StepKind) -> tuple[Scene, Plan]:
    """A job is cancelled and submitted anew while a plan moves it."""
    scene = running_pair()
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 0)
    plan = planned(scene)
    carry_out(scene, plan, up_to=up_to)
    job = scene.state.jobs["gpt-a"]
    scene.tell(JobCancelled(id="cancelled", at=scene.now, job="gpt-a", submission=job.submission))
    scene.submit("gpt-a")
    return scene, plan


@pytest.mark.parametrize("up_to", [StepKind.DRAIN, StepKind.RESTORE, StepKind.LAUNCH, StepKind.RESUME])
def test_a_new_submission_does_not_begin_from_what_an_earlier_one_has_learned(up_to: StepKind) -> None:
    """Storm 5: steps of the earlier one, which were under way, told that this one had chosen where to begin."""
    scene, plan = resubmitted_under_way(up_to)
    before = scene.state.jobs["gpt-a"].generation
    while scene.step(plan.id, iteration=7):
        pass
    job = scene.state.jobs["gpt-a"]
    assert (job.restored, job.iteration, job.generation) == (False, -1, before)
    scene.settle()
    job = scene.state.jobs["gpt-a"]
    assert job.restored
    assert job.generation > before


def test_what_ranks_of_an_earlier_submission_tell_is_not_about_the_new_one() -> None:
    scene, plan = resubmitted_under_way(StepKind.RESUME)
    job = scene.state.jobs["gpt-a"]
    it = {"job": "gpt-a", "generation": job.generation}
    scene.tell(JobFinished(id="done", at=scene.now, iteration=99, **it))
    scene.fail(ErrorKind.USER_ERROR, "gpt-a", 0)
    assert scene.state.jobs["gpt-a"] == job
    assert plan.id == scene.state.active_plan.plan.id


def test_nodes_with_ranks_of_an_earlier_submission_are_not_forgotten() -> None:
    scene, _ = resubmitted_under_way(StepKind.STOP)
    assert scene.state.jobs["gpt-a"].left_on
