"""Whatever layouts a job allows and whatever happens to its nodes: it runs in one of them, the best one that has a place."""

from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Scene

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Assignment, PlanKind, StepKind

SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
MOST = 8
flops = st.sampled_from([number * 1e8 for number in range(1, 10)])


@st.composite
def ways(draw: st.DrawFn) -> tuple[ParallelLayout, ...]:
    """Some layouts, all with tables or none."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4, unique=True))
    has_tables = draw(st.booleans())
    return tuple(
        ParallelLayout(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            throughput_flops={x: draw(flops) for x in range(tp * pp, MOST + 1, tp * pp)} if has_tables else {},
        )
        for tp, pp in shapes
    )


def check(scene: Scene, assignment: Assignment) -> None:
    spec, layout = scene.state.jobs["a"].spec, assignment.layout
    assert layout in spec.layouts(assignment.num_gpus)
    lines = [assignment.slots[first : first + layout.tp] for first in range(0, assignment.num_gpus, layout.tp)]
    assert all(len({slot.node for slot in line}) == 1 for line in lines), "a line of tensor parallelism spans no nodes"


@settings(max_examples=50, deadline=None)
@given(
    allowed=ways(),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    events=st.lists(st.tuples(st.sampled_from(["lose", "join"]), st.integers(1, 4)), max_size=3),
)
def test_a_job_runs_in_one_of_its_layouts_and_ranks_outlive_no_change_of_it(allowed, sizes, events) -> None:
    scene = Scene(granularity_gpus=1)
    for number, num_gpus in enumerate(sizes):
        scene.join(f"node-{number}", num_gpus)
    least = min(way.replica.num_gpus for way in allowed)
    scene.submit("a", min_gpus=least, throughput_flops={}, parallel_layouts=allowed, transition_s=1.0)
    for event, number in [("", 0), *events]:
        before = scene.state.jobs["a"].assignment
        if event == "join":
            scene.join(scene.new_id("node"), number)
        elif event == "lose" and before:
            scene.lose(before.nodes[number % len(before.nodes)])
        scene.now += 1.5
        if isinstance(action := scene.decide(), Respond):
            plan = scene.plan(action)
            for assignment in plan.assignments:
                check(scene, assignment)
                holds = [step.hold for step in plan.steps if step.kind is StepKind.DRAIN]
                same = before is None or before.layout.shape == assignment.layout.shape
                assert same or holds == [None] * len(holds)
                assert plan.reason.count("a runs in ") == (plan.kind is PlanKind.REALLOCATE)
        scene.settle()


@settings(max_examples=30, deadline=None)
@given(allowed=ways(), nodes=st.integers(1, 2))
def test_on_whole_nodes_the_best_table_decides(allowed, nodes) -> None:
    scene = Scene(granularity_gpus=1)
    for number in range(nodes):
        scene.join(f"node-{number}", 4)
    least = min(way.replica.num_gpus for way in allowed)
    scene.submit("a", min_gpus=least, throughput_flops={}, parallel_layouts=allowed)
    scene.settle()
    assignment = scene.state.jobs["a"].assignment
    tables = {way.replica.shape: way.throughput_flops for way in allowed}
    if assignment is None or not any(tables.values()):
        return
    best = max(table[size] for table in tables.values() for size in table if size <= 4 * nodes)
    assert tables[assignment.layout.shape][assignment.num_gpus] == best
