"""What storms have found and what has been mended since, each as the smallest scene that shows it."""

from scenes import Scene, running_pair

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.events import BreakerTripped
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
