"""Tensor and pipeline parallelism change nothing but who computes what."""

import pytest
import torch
from layout_world import replicas_of, train, whole_state

from unicron_lib.checkpointing.model_state import of_the_state, owned_at, parameters, slices_at
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout, Place

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = JobSpec(
    job="tiny",
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    seq_length=16,
    global_batch_size=8,
    train_iters=4,
    params_dtype="float64",
    hidden_dropout=0.1,
)
ALONE = Layout()
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(pp=4),
    Layout(tp=2, pp=2),
    Layout(tp=2, dp=2),
    Layout(pp=2, dp=3),
    Layout(tp=2, pp=2, dp=2),
]


@pytest.fixture(scope="module")
def undisturbed(one_thread):
    return train(SPEC, ALONE, iterations=SPEC.train_iters)


def told_of(layout: Layout) -> str:
    return f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=told_of)
def test_a_layout_ends_with_the_losses_and_the_state_of_one_rank(undisturbed, layout: Layout) -> None:
    (alone,), (expected,) = undisturbed
    replicas, told = train(SPEC, layout, iterations=SPEC.train_iters, seed=layout.num_gpus)
    for found in told:
        assert [it.samples for it in found] == [it.samples for it in expected]
        assert [it.loss for it in found] == pytest.approx([it.loss for it in expected], rel=1e-13)
        assert found == told[0]
    whole = whole_state(replicas, layout)
    assert max(float((whole[name] - tensor).abs().max()) for name, tensor in alone.state().items()) <= 1e-12
    for first, other in ((rank % layout.replica_size, rank) for rank in range(layout.num_gpus)):
        assert all(torch.equal(replicas[first].state()[name], tensor) for name, tensor in replicas[other].state().items())


@pytest.mark.parametrize(("params_dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_other_precisions_agree_within_their_own(params_dtype: str, tolerance: float) -> None:
    spec = JobSpec(**{it: getattr(SPEC, it) for it in SPEC.__slots__} | {"params_dtype": params_dtype, "micro_batch_size": 2})
    _, (expected,) = train(spec, ALONE, iterations=3)
    _, told = train(spec, Layout(tp=2, pp=2, dp=2), iterations=3)
    assert [it.loss for it in told[3]] == pytest.approx([it.loss for it in expected], rel=tolerance)


@pytest.mark.parametrize("layout", [ALONE, *LAYOUTS], ids=told_of)
def test_the_table_of_tensors_is_the_models_own_and_each_element_counts_once(layout: Layout) -> None:
    replicas = replicas_of(SPEC, layout)[: layout.replica_size]
    counted = 0
    for rank, replica in enumerate(replicas):
        place = layout.place(rank)
        assert {name: tuple(it.shape) for name, it in replica.state().items()} == {
            name: it.size for name, it in of_the_state(slices_at(SPEC, layout, place)).items()
        }
        here = slices_at(SPEC, layout, place)
        counted += sum(here[name].num_elements for name in owned_at(SPEC, layout, place))
    (alone,) = replicas_of(SPEC, ALONE)
    assert counted == sum(it.numel() for name, it in alone.state().items() if name.startswith("param."))
    assert {it.name for it in parameters(SPEC)} == {n.removeprefix("param.") for n in alone.state() if n.startswith("param.")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=told_of)
def test_initial_weights_do_not_depend_on_the_layout(layout: Layout) -> None:
    (alone,) = replicas_of(SPEC, ALONE)
    whole = whole_state(replicas_of(SPEC, layout), layout)
    assert all(torch.equal(whole[name], tensor) for name, tensor in alone.state().items())


def test_ranks_with_consecutive_numbers_are_a_replica() -> None:
    layout = Layout(tp=2, pp=3, dp=2)
    assert [layout.place(rank) for rank in (0, 1, 2, 5, 6, 11)] == [
        Place(),
        Place(tp=1),
        Place(pp=1),
        Place(tp=1, pp=2),
        Place(dp=1),
        Place(tp=1, pp=2, dp=1),
    ]
