"""The planner chooses a job's layout for each number of GPUs: by tables, by what was measured, by the model."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from scenes import Scene

from unicron_lib.cli.look import job_rows
from unicron_lib.detection.measured import measurements
from unicron_lib.domain.actions import Respond
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec, JobState
from unicron_lib.domain.parallel_layouts import ParallelLayout
from unicron_lib.domain.plans import Assignment, Layout, Plan, PlanKind, Slot, StepKind
from unicron_lib.planning import layout_choice
from unicron_lib.planning.allocation import Request, allocate
from unicron_lib.planning.layout_choice import Choice, kept_first
from unicron_lib.planning.model_profile import A100
from unicron_lib.planning.placement import Rules
from unicron_lib.planning.planner import make_plan
from unicron_lib.planning.scene import Scene as PlanScene
from unicron_lib.planning.throughput import model_of, profiles
from unicron_lib.planning.transition_cost import Bandwidths
from unicron_lib.planning.waf import Demand, cost

LINE = Layout(tp=2)


def way(tp: int = 1, pp: int = 1, **flops: float) -> ParallelLayout:
    table = {int(size.strip("x")): flop for size, flop in flops.items()}
    return ParallelLayout(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, throughput_flops=table)


def choice_of(spec: JobSpec, by_shape: Mapping[str, Mapping[int, float]] | None = None, **keys: object) -> Choice:
    found = profiles([spec], {}, measured_by_shape={spec.job: by_shape or {}}, **keys)[spec.job]
    assert isinstance(found, Choice)
    return found


def best(choice: Choice, size: int) -> Layout:
    return choice.ranked(size)[0].layout


def test_with_tables_the_one_with_the_most_flops_wins() -> None:
    spec = JobSpec(job="a", parallel_layouts=(way(x1=1e8, x2=1.5e8, x4=4e8), way(2, x2=2e8, x4=3e8)))
    choice = choice_of(spec)
    assert [best(choice, size) for size in (1, 2, 4)] == [Layout(), Layout(tp=2), Layout(dp=4)]
    assert [choice.flops(size) for size in (1, 2, 3, 4)] == [1e8, 2e8, 0.0, 4e8]


def test_with_one_table_for_all_and_with_none_the_model_chooses() -> None:
    ways = (way(2), way(pp=2), way())
    for spec in (JobSpec(job="a", parallel_layouts=ways), JobSpec(job="a", parallel_layouts=ways, throughput_flops={2: 5e8})):
        choice = choice_of(spec)
        assert best(choice, 2) == max((it.layout for it in choice.ranked(2)), key=choice.model)
    assert choice.flops(2) == 5e8
    assert {it.source for it in choice.ranked(2)} == {"by the model"}


def test_of_equals_the_most_replicas_then_the_owners_order() -> None:
    layouts = [Layout(tp=4), Layout(pp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2)]
    choice = Choice(allowed=lambda _: layouts, model=lambda _: 1.0)
    assert [it.layout for it in choice.ranked(4)] == [layouts[2], layouts[3], layouts[0], layouts[1]]


def test_a_measurement_counts_for_its_layout_only_and_calibrates_all() -> None:
    spec = JobSpec(job="a", parallel_layouts=(way(2), way()))
    plain = choice_of(spec)
    slow = choice_of(spec, {"tp=2 pp=1": {2: 1e6}})
    assert slow.flops_in(Layout(tp=2)) == 1e6
    ratio = 1e6 / plain.model(Layout(tp=2))
    assert slow.flops_in(Layout(dp=2)) == pytest.approx(ratio * plain.model(Layout(dp=2)))
    order = [it.layout for it in plain.ranked(2)]
    assert [it.layout for it in slow.ranked(2)] == order, "the model keeps its order of what was not measured"
    turned = choice_of(spec, {order[0].shape: {2: 1e6}, order[1].shape: {2: 2e6}})
    assert [it.layout for it in turned.ranked(2)] == order[::-1]
    assert {it.source for it in turned.ranked(2)} == {"measured"}


def test_a_measurement_of_a_layout_that_is_no_more_allowed_is_nothing() -> None:
    spec = JobSpec(job="a", parallel_layouts=(way(),))
    assert choice_of(spec, {"tp=2 pp=1": {2: 1e6}, "tp=1 pp=1": {99: 1e6}}).measured == {}


def test_what_does_not_fit_into_the_memory_of_a_known_gpu_is_left_out() -> None:
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048, "vocab_size": 51200}
    spec = JobSpec(job="big", params_dtype="bfloat16", parallel_layouts=(way(), way(8)), global_batch_size=64, **sizes)
    assert [it.layout.tp for it in choice_of(spec, gpu_models=["NVIDIA A100-SXM4-80GB"]).ranked(8)] == [8]
    assert {it.layout.tp for it in choice_of(spec).ranked(8)} == {1, 8}, "nobody knows the device"
    hopeless = replace(A100, memory_bytes=1e6)
    assert len(layout_choice.allowed(spec, model_of(spec), hopeless)(8)) == 2, "the owner knows better"


def test_on_as_many_gpus_as_before_a_running_job_keeps_its_layout() -> None:
    choice = choice_of(JobSpec(job="a", parallel_layouts=(way(x2=1e8), way(2, x2=2e8))))
    assert [it.layout for it in kept_first(choice.ranked(2), Layout(dp=2))] == [Layout(dp=2), Layout(tp=2)]
    assert [it.layout for it in kept_first(choice.ranked(2), None)] == [Layout(tp=2), Layout(dp=2)]


# --- plans -------------------------------------------------------------------------------------------------------------------

WAYS = (way(2, x2=9e8, x4=16e8), way(x1=4e8, x2=7e8, x3=10e8))


def started(*sizes: int, ways: tuple[ParallelLayout, ...] = WAYS, **keys: object) -> Scene:
    scene = Scene(granularity_gpus=1)
    for number, num_gpus in enumerate(sizes, 1):
        scene.join(f"node-{number}", num_gpus)
    scene.submit("a", throughput_flops={}, parallel_layouts=ways, **{"min_gpus": 1, "transition_s": 1.0, **keys})
    scene.settle()
    return scene


def planned(scene: Scene) -> Plan:
    scene.now += 1.5
    action = scene.decide()
    assert isinstance(action, Respond), action
    return scene.plan(action)


def steps_of(plan: Plan) -> dict[StepKind, object]:
    return {step.kind: step.hold for step in plan.steps}


def test_a_lost_node_that_makes_the_layout_impossible_changes_it() -> None:
    scene = started(2, 1, max_gpus=2)
    assert scene.state.jobs["a"].assignment.layout == LINE
    scene.lose("node-1")
    plan = planned(scene)
    assert plan.assignments[0].layout == Layout()
    assert plan.gpus == {"a": 1}
    assert "a runs in tp=1 pp=1 dp=1 instead of tp=2 pp=1: the only layout on 1 GPU" in plan.reason


def test_the_layout_is_shown_where_it_is_not_plain() -> None:
    scene = started(2, 2, max_gpus=2)
    scene.submit("plain", min_gpus=2, max_gpus=2)
    scene.settle()
    assert {row["job"]: row["layout"] for row in job_rows(scene.state, {})} == {"a": "tp=2 pp=1 dp=1", "plain": ""}


def test_a_change_of_layout_leaves_no_rank_alive_and_drains_all() -> None:
    scene = started(1, 1, ways=(way(pp=2, x2=9e8), way(x1=4e8, x2=5e8)))
    assert scene.state.jobs["a"].assignment.layout == Layout(pp=2)
    scene.lose("node-2")
    smaller = planned(scene)
    assert smaller.assignments[0].layout == Layout()
    assert steps_of(smaller) == dict.fromkeys(StepKind)
    scene.settle()
    scene.join("node-2", 1)
    larger = planned(scene)
    assert larger.assignments[0].layout == Layout(pp=2)
    assert steps_of(larger) == dict.fromkeys(StepKind), "healthy ranks are drained, and save"
    assert "a runs in tp=1 pp=2 dp=1 instead of tp=1 pp=1: the best of 2 layouts on 2 GPUs" in larger.reason


def test_ranks_live_on_where_only_the_number_of_replicas_changes() -> None:
    scene = started(2, 2, ways=(way(2, x2=9e8, x4=16e8), way(x1=1e8)))
    assert scene.state.jobs["a"].assignment.layout == Layout(tp=2, dp=2)
    scene.lose("node-2")
    plan = planned(scene)
    assert plan.assignments[0].layout == LINE
    assert plan.steps[0].hold is not None


def test_a_superseded_change_of_layout_does_not_mix_memories_of_both() -> None:
    """Ranks still are those of the layout before it, whatever the last plan says."""
    scene = started(1, 1, 1, ways=(way(pp=2, x2=9e8), way(x1=4e8, x3=20e8)))
    assert scene.state.jobs["a"].assignment.layout == Layout(dp=3)
    scene.lose("node-3")
    first = planned(scene)
    assert first.assignments[0].layout == Layout(pp=2)
    rank = first.assignments[0].slots[0]
    scene.fault(ErrorKind.ECC_ERROR, "node-2" if rank.node == "node-1" else "node-1")
    scene.join("node-4", 1)
    second = planned(scene)
    assert second.assignments[0].layout == Layout(pp=2)
    assert steps_of(second)[StepKind.DRAIN] is None


def test_groups_of_gpus_that_no_node_has_rule_a_layout_out() -> None:
    scene = started(1, 1, 1, max_gpus=2)
    assert scene.state.jobs["a"].assignment.layout == Layout(dp=2)


def test_where_others_leave_no_room_for_the_groups_the_next_best_layout_runs() -> None:
    scene = Scene(granularity_gpus=1)
    for number in (1, 2):
        scene.join(f"node-{number}", 3)
    scene.submit("b", min_gpus=4, max_gpus=4, throughput_flops={4: 1e12}, tensor_model_parallel_size=2)
    scene.settle()
    scene.submit("a", min_gpus=1, max_gpus=2, throughput_flops={}, parallel_layouts=WAYS)
    plan = planned(scene)
    assert plan.assignment_of("a").layout == Layout(dp=2)
    assert "a cannot be placed" in plan.reason
    assert not plan.optimal


def test_a_job_waits_for_the_smallest_size_of_any_layout() -> None:
    scene = started(2, ways=(way(2, x4=9e8), way(2, 2, x8=9e8)), min_gpus=4)
    reason = list(scene.state.plans.values())[-1].plan.reason
    assert "a waits: it needs at least 4 GPUs" in reason


def test_a_job_that_starts_again_where_it_is_keeps_its_layout() -> None:
    scene = started(2, max_gpus=2)
    scene.fail(ErrorKind.PROCESS_EXIT, "a", 1)
    plan = planned(scene)
    assert (plan.kind, plan.assignments[0].layout) == (PlanKind.RESTART, LINE)
    assert plan.steps[0].hold is not None


AS_FAST = Bandwidths(peer_memory=Bandwidths().store)


def demand_of(scene: Scene, **respond: object) -> Demand:
    asked = Respond(kind=PlanKind.REALLOCATE, incidents=(), attempt=1, reason="", **respond)
    return PlanScene(
        state=scene.state,
        respond=asked,
        measured={},
        measured_by_shape={},
        rules=Rules(),
        checkpoint_formats={},
        bandwidths=AS_FAST,
    ).demands(1)[0]


def test_a_change_of_layout_has_its_price() -> None:
    scene = started(2, 2, ways=(way(2, x4=16e8), way(x1=4e8, x2=9e8)), max_gpus=2)
    spec = replace(scene.state.jobs["a"].spec, max_gpus=4)
    scene.state = scene.state.with_job(replace(scene.state.jobs["a"], spec=spec))
    healthy, faulted = demand_of(scene), demand_of(scene, faulted=("a",))
    assert set(healthy.relayout_s) == {4}
    assert healthy.relayout_s[4] > 0
    through = {size: cost(healthy, size) / healthy.current_flops for size in (1, 4)}
    assert through[4] == pytest.approx(through[1] + healthy.relayout_s[4])
    assert faulted.relayout_s[4] == pytest.approx(healthy.relayout_s[4]), "the replica that is left saves"


def test_a_price_that_is_too_high_keeps_the_layout() -> None:
    cheap = Demand(job="a", throughput_flops={2: 1e9, 4: 1.2e9}, current_gpus=2, current_flops=1e9, transition_s=1.0)
    shares = [
        allocate(Request(demands=(demand,), num_gpus=4, mtbf_gpu_s=1000.0), timer=lambda: 0.0).gpus
        for demand in (cheap, replace(cheap, relayout_s={4: 100.0}))
    ]
    assert shares == [{"a": 4}, {"a": 2}]


def test_ranks_that_have_parts_save_nothing_if_one_of_them_is_lost() -> None:
    scene = started(2, max_gpus=2, ways=(way(2, x2=9e8), way(x1=1e8)))
    healthy, faulted = demand_of(scene), demand_of(scene, faulted=("a",))
    assert set(healthy.relayout_s) == {1}
    total = [demand.transition_s + demand.relayout_s[1] for demand in (healthy, faulted)]
    assert total[1] > total[0], "work since the newest copy in memory is done again"
    spec = replace(scene.state.jobs["a"].spec, memory_interval=0)
    scene.state = scene.state.with_job(replace(scene.state.jobs["a"], spec=spec))
    unkept = demand_of(scene, faulted=("a",))
    assert unkept.transition_s + unkept.relayout_s[1] > total[1], "there is the newest checkpoint only"


def test_measurements_are_journalled_by_the_layout_of_their_generation() -> None:
    spec = JobSpec(job="a", parallel_layouts=WAYS)
    slots = (Slot("n", 0), Slot("n", 1))
    job = JobState(spec=spec, generation=3, assignment=Assignment(job="a", generation=3, layout=LINE, slots=slots))
    (event,) = measurements(job, {2: 5e8}, 1.0, generation=3)
    assert (event.num_gpus, event.shape) == (2, "tp=2 pp=1")
    assert not list(measurements(job, {2: 5e8}, 1.0, generation=2)), "nobody knows that generation's layout"
    (plain,) = measurements(replace(job, spec=JobSpec(job="a")), {2: 5e8}, 1.0, generation=2)
    assert plain.shape == ""
    known = replace(job, measured_by_shape={"tp=2 pp=1": {2: 5e8}})
    assert not list(measurements(known, {2: 5.1e8}, 1.0, generation=3))


def test_a_measured_layout_is_known_to_the_next_plan() -> None:
    scene = Scene(granularity_gpus=1)
    scene.join("node-1", 2)
    scene.submit("a", min_gpus=2, throughput_flops={}, parallel_layouts=(way(2), way()))
    scene.now += 1.5
    action = scene.decide()
    assert isinstance(action, Respond)
    for fast, slow in ((Layout(tp=2), Layout(dp=2)), (Layout(dp=2), Layout(tp=2))):
        measured = {"a": {fast.shape: {2: 9e8}, slow.shape: {2: 5e8}}}
        plan = make_plan(scene.state, action, measured={}, measured_by_shape=measured, mtbf_gpu_s=6.2e7, timer=lambda: 0.0)
        assert plan.assignments[0].layout == fast
        assert "measured" in plan.reason
