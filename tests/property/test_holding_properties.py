"""Whatever happens in whatever order: who is said to live on can be asked to, is there, and is of this submission."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Continue, Respond
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.plans import Plan, StepKind

KINDS = [ErrorKind.PROCESS_EXIT, ErrorKind.TASK_HANG, ErrorKind.NCCL_TIMEOUT, ErrorKind.LOSS_ANOMALY, ErrorKind.OTHER]
happening = st.one_of(
    st.tuples(st.just("fail"), st.sampled_from(["gpt-a", "gpt-b"]), st.integers(0, 3), st.sampled_from(KINDS)),
    st.tuples(st.just("lose"), st.integers(1, 4)),
    st.tuples(st.just("join"), st.integers(1, 4)),
    st.tuples(st.just("finish"), st.just("gpt-b")),
    st.tuples(st.just("work"), st.integers(1, 12)),
)


def happen(scene: Scene, what: tuple[object, ...]) -> None:
    match what:
        case ("fail", job, rank, kind):
            held = scene.state.jobs[job].assignment or scene.state.jobs[job].pending
            if held and rank < held.num_gpus:
                spoiled = (8, 8) if kind is ErrorKind.LOSS_ANOMALY else None
                scene.fail(kind, job, rank, spoiled=spoiled)
        case ("lose", number):
            if f"node-{number}" in scene.state.nodes:
                scene.lose(f"node-{number}")
        case ("join", number):
            scene.join(f"node-{number}")
        case ("finish", job):
            scene.finish(job)
        case ("work", times):
            for _ in range(times):
                scene.now += 1.5
                work(scene)


def work(scene: Scene) -> None:
    match scene.decide():
        case Respond() as respond:
            before = scene.state
            check(before, scene.plan(respond))
        case Continue(plan=plan):
            scene.step(plan)


def check(state: object, plan: Plan) -> None:
    for step in plan.steps:
        if step.hold is None:
            continue
        job, assignment = state.jobs[step.job], plan.assignment_of(step.job)
        assert step.kind in {StepKind.DRAIN, StepKind.STOP}
        assert step.hold.kept
        assert set(step.hold.kept) <= set(assignment.slots)
        assert {slot.node for slot in step.hold.kept} <= set(step.nodes), "it is asked where they live"
        assert all(state.nodes[slot.node].status is NodeStatus.READY for slot in step.hold.kept)
        assert job.restored
        assert job.rolled_back_to is None
        assert step.job not in plan.rewinds


@settings(max_examples=60, deadline=None)
@given(st.lists(happening, max_size=20))
def test_who_is_said_to_live_on_can(story: list[tuple[object, ...]]) -> None:
    scene = running_pair()
    for what in story:
        happen(scene, what)
