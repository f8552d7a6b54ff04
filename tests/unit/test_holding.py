"""Which ranks live on in a plan, and how they come to park."""

from dataclasses import replace

import pytest
from scenes import Scene, running_pair

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import STEP_ORDER, Assignment, Hold, Layout, Plan, Slot, StepKind
from unicron_lib.planning.holding import memory_of, whole_replicas


def planned(scene: Scene) -> Plan:
    scene.now += 1.5
    action = scene.decide()
    assert isinstance(action, Respond), action
    return scene.plan(action)


def hold_in(plan: Plan, job: str = "gpt-a") -> Hold | None:
    """Of DRAIN and STOP, which have the same."""
    holds = {step.kind: step.hold for step in plan.steps if step.job == job}
    assert holds[StepKind.DRAIN] == holds[StepKind.STOP]
    assert {holds.get(kind) for kind in (StepKind.RESTORE, StepKind.LAUNCH, StepKind.RESUME)} == {None}
    return holds[StepKind.DRAIN]


def carry_out(scene: Scene, plan: Plan, *, up_to: StepKind) -> None:
    for _ in range(sum(STEP_ORDER.index(step.kind) < STEP_ORDER.index(up_to) for step in plan.steps)):
        scene.step(plan.id)


@pytest.fixture
def scene() -> Scene:
    return running_pair()


def test_after_a_crash_all_other_ranks_live_on_and_park_at_once(scene: Scene) -> None:
    slots = scene.state.jobs["gpt-a"].assignment.slots
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 1)
    hold = hold_in(planned(scene))
    assert hold == Hold(kept=tuple(sorted(slots)), abort=True)


def test_after_a_node_loss_those_on_the_other_nodes_do(scene: Scene) -> None:
    slots = scene.state.jobs["gpt-a"].assignment.slots
    lost = slots[-1].node
    scene.lose(lost)
    hold = hold_in(planned(scene))
    assert hold == Hold(kept=tuple(sorted(slot for slot in slots if slot.node != lost)), abort=True)


def test_a_healthy_job_that_is_moved_parks_at_the_end_of_an_iteration(scene: Scene) -> None:
    scene.finish("gpt-b")
    plan = planned(scene)
    hold = hold_in(plan)
    assert hold is not None
    assert not hold.abort
    assert set(hold.kept) < set(plan.assignment_of("gpt-a").slots), "it grows"


@pytest.mark.parametrize("parks", [True, False])
def test_of_commands_only_one_that_parks_lives_on(scene: Scene, *, parks: bool) -> None:
    job = scene.state.jobs["gpt-a"]
    spec = JobSpec(job="gpt-a", command=("python",), min_gpus=2, throughput_flops=job.spec.throughput_flops, parks=parks)
    scene.state = scene.state.with_job(replace(job, spec=spec))
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 1)
    assert (hold_in(planned(scene)) is not None) is parks


def test_a_job_that_ends_or_gets_no_gpus_holds_nothing(scene: Scene) -> None:
    scene.finish("gpt-b")
    plan = planned(scene)
    assert {step.hold for step in plan.steps if step.job == "gpt-b"} == {None}


def test_a_rank_that_hangs_is_condemned_and_who_waits_for_it_is_not(scene: Scene) -> None:
    scene.stall("gpt-a", 2)
    scene.stall("gpt-a", 0, ErrorKind.NCCL_TIMEOUT)
    scene.now += 10.0
    hold = hold_in(planned(scene))
    assert hold is not None
    assert hold.condemned == (2,)


def test_if_all_ranks_hang_it_is_none_of_them(scene: Scene) -> None:
    for rank in range(4):
        scene.stall("gpt-a", rank)
    scene.now += 10.0
    hold = hold_in(planned(scene))
    assert hold is not None
    assert hold.condemned == ()


def test_a_job_that_goes_back_holds_nothing(scene: Scene) -> None:
    scene.fail(ErrorKind.LOSS_ANOMALY, "gpt-a", 1, iteration=7, spoiled=(8, 8))
    assert hold_in(planned(scene)) is None


def test_a_submission_that_has_not_begun_takes_over_nothing_of_the_one_before(scene: Scene) -> None:
    job = scene.state.jobs["gpt-a"]
    scene.state = scene.state.with_job(replace(job, restored=False))
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 1)
    assert hold_in(planned(scene)) is None


@pytest.mark.parametrize("up_to", STEP_ORDER)
def test_a_second_failure_in_the_middle_is_answered_with_the_same_ranks(scene: Scene, up_to: StepKind) -> None:
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 1)
    first = planned(scene)
    carry_out(scene, first, up_to=up_to)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 2)
    second = planned(scene)
    assert hold_in(second) == hold_in(first)


def test_ranks_that_a_given_up_plan_had_launched_elsewhere_live_on_if_their_gpu_is_kept(scene: Scene) -> None:
    scene.finish("gpt-b")
    grown = planned(scene)
    carry_out(scene, grown, up_to=StepKind.RESUME)
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 0)
    hold = hold_in(planned(scene))
    assert hold is not None
    assert set(hold.kept) == set(grown.assignment_of("gpt-a").slots)


@pytest.mark.parametrize("kind", [StepKind.LAUNCH, StepKind.RESUME])
def test_what_failed_with_them_is_tried_without_them(scene: Scene, kind: StepKind) -> None:
    scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", 1)
    first = planned(scene)
    carry_out(scene, first, up_to=kind)
    step = next(step for step in first.steps if step.kind is kind)
    scene.fail(ErrorKind.OTHER, "gpt-a", name=f"step/{step.id}")
    assert hold_in(planned(scene)) is None


def test_after_failures_in_a_row_without_an_iteration_it_begins_with_new_processes(scene: Scene) -> None:
    holds = []
    for rank in range(4):
        scene.fail(ErrorKind.PROCESS_EXIT, "gpt-a", rank, iteration=7)
        plan = planned(scene)
        holds.append(hold_in(plan) is not None)
        carry_out(scene, plan, up_to=StepKind.RESUME)
    assert holds == [True, True, False, False]


# what they have


HOLD = Hold(kept=(Slot("n1", 0), Slot("n1", 1)), abort=True)


def told(node: str, gpu: int, iteration: int, state: str = "parked") -> dict[str, object]:
    it = {"rank": gpu, "generation": 1, "state": state, "iteration": iteration, "manifest": None, "micro_batches": 2}
    return {**it, "node": node, "gpu": gpu}


def test_what_is_kept_is_told_with_the_newest_iteration() -> None:
    found = memory_of(HOLD, [told("n1", 0, 7), told("n1", 1, 6), told("n2", 0, 7)])
    assert found == {"source": "memory of 2 ranks", "iteration": 7, "manifest": None, "held": 2, "micro_batches": 4}


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [told("n2", 0, 7)],
        [told("n1", 0, 7, "gone")],
        [told("n1", 0, -1)],
        [told("n1", 0, 5), told("n2", 0, 7)],
    ],
    ids=["nobody", "given up", "dead", "empty", "far behind"],
)
def test_without_memory_that_is_worth_it_others_are_saved(ranks: list[dict[str, object]]) -> None:
    assert memory_of(HOLD, ranks) is None


def of(rank: int, iteration: int, generation: int = 1) -> dict[str, object]:
    """A parked rank, two of which are a replica, on the GPU of its number."""
    return {**told("n1", rank, iteration), "generation": generation}


EVERYWHERE = Hold(kept=tuple(Slot("n1", gpu) for gpu in range(4)), abort=True)
PAIRS = Assignment(job="gpt-a", generation=2, layout=Layout(tp=2, dp=2), slots=EVERYWHERE.kept)


@pytest.mark.parametrize(
    ("ranks", "iteration"),
    [
        ([of(0, 7), of(1, 7)], 7),
        ([of(0, 7), of(3, 7)], 7),
        ([of(0, 7), of(2, 6), of(3, 6)], 6),
        ([of(0, 7), of(2, 7)], None),
        ([of(0, 7), of(1, 6)], 7),
        ([of(0, 7), of(3, 6)], None),
        ([of(0, 8), of(1, 6)], None),
    ],
    ids=["a replica", "parts of two", "one is behind", "no second part", "one has stepped", "of two replicas", "far behind"],
)
def test_ranks_that_are_parts_of_replicas_hold_what_they_have_all_parts_of(ranks, iteration) -> None:
    found = memory_of(EVERYWHERE, ranks, PAIRS)
    assert (found and found["iteration"]) == iteration


def test_a_rank_that_is_to_become_another_part_holds_nothing() -> None:
    turned = replace(PAIRS, slots=(Slot("n1", 1), Slot("n1", 0), Slot("n1", 2), Slot("n1", 3)))
    assert memory_of(EVERYWHERE, [of(0, 7), of(1, 7)], turned) is None
    assert memory_of(EVERYWHERE, [of(0, 7), of(1, 7), of(2, 7), of(3, 7)], turned)["held"] == 2


def test_those_who_save_together_have_each_part_of_one_iteration() -> None:
    ranks = [of(0, 7), of(1, 7), of(3, 7), of(2, 6), of(1, 8), of(2, 7, 2), of(3, 7, 2)]
    assert [[(it["rank"], it["iteration"], it["generation"]) for it in one] for one in whole_replicas(ranks, 2)] == [
        [(2, 7, 2), (3, 7, 2)],
        [(0, 7, 1), (1, 7, 1)],
        [(0, 7, 1), (3, 7, 1)],
    ]


def test_replicas_of_one_rank_save_alone_the_furthest_first() -> None:
    assert [[it["rank"] for it in one] for one in whole_replicas([of(0, 6), of(2, 7), of(1, 7)], 1)] == [[1], [2], [0]]
