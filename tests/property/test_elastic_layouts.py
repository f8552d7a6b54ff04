"""Whatever is lost on the way, replicas of several ranks end with the parameters of one rank that nothing has happened to."""

import tempfile
from pathlib import Path

import pytest
import torch
from elastic_world import CountingReplica, Generation, World, small_job
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from layout_world import replicas_of, train
from memory_peers import Fault

from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.training.ledger import check_ledger

pytestmark = pytest.mark.usefixtures("one_thread")

MOST = 3
KINDS = [(2, 1), (1, 2), (2, 2), (1, 3)]


def sized(tp: int, pp: int) -> JobSpec:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "min_gpus": tp * pp}
    return small_job(num_layers=6, global_batch_size=7, train_iters=3, save_interval=1, **sizes)


@pytest.fixture(scope="module")
def pools(one_thread) -> dict[tuple[int, int], list[CountingReplica]]:
    return {(tp, pp): replicas_of(sized(tp, pp), Layout(tp=tp, pp=pp, dp=4 * MOST), CountingReplica) for tp, pp in KINDS}


@pytest.fixture(scope="module")
def undisturbed(one_thread) -> dict[str, torch.Tensor]:
    spec = sized(1, 1)
    (alone,), _ = train(spec, Layout(), iterations=spec.train_iters)
    return alone.state()


def check(kind: tuple[int, int], pools: dict, undisturbed: dict[str, torch.Tensor], plans: list[Generation]) -> World:
    spec = sized(*kind)
    with tempfile.TemporaryDirectory() as name:
        world = World(spec, Path(name), pools[kind])
        is_finished = any(world.live(plan) for plan in (*plans, Generation(size=2)))
        assert is_finished
        assert world.done_again == []
        assert check_ledger(Path(name), spec) == []
    ends = [memory for memory in world.people.values() if memory.position.iteration == spec.train_iters - 1]
    layout = spec.layout(9)
    assert {memory.replica.siblings.place for memory in ends} == {layout.place(r) for r in range(layout.replica_size)}
    for replica in (memory.replica for memory in ends):
        for tensor_name, tensor in replica.state().items():
            piece = replica.slices[tensor_name]
            expected = undisturbed[tensor_name][piece.within(TensorSlice.all_of(piece.whole))]
            assert float((tensor - expected).abs().max()) <= 1e-12, tensor_name
    return world


faults = st.builds(
    Fault,
    rank=st.integers(0, 4 * MOST),
    at=st.integers(0, 90),
    kind=st.sampled_from(["kill", "kill", "kill", "cut", "park"]),
    moment=st.sampled_from(["before", "amid", "after"]),
    lucky=st.frozensets(st.integers(0, 4 * MOST - 1)),
)
generations = st.builds(
    Generation,
    size=st.integers(1, MOST),
    faults=st.lists(faults, min_size=1, max_size=2).map(tuple),
    absent=st.just(frozenset()) | st.frozensets(st.integers(0, 4 * MOST - 1), max_size=2),
    turn=st.integers(0, MOST - 1),
    seed=st.integers(0, 1 << 16),
)
schedules = st.lists(generations, min_size=1, max_size=3)
quiet = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(quiet, max_examples=15)
@given(kind=st.sampled_from(KINDS), plans=schedules)
def test_a_job_of_cut_replicas_ends_as_if_nothing_had_happened(pools, undisturbed, kind, plans: list[Generation]) -> None:
    world = check(kind, pools, undisturbed, plans)
    event(f"{len(world.fired)} faults")


@pytest.mark.storm
@pytest.mark.timeout(1500)
@settings(quiet, max_examples=300)
@given(kind=st.sampled_from(KINDS), plans=schedules)
def test_a_job_of_cut_replicas_ends_as_if_nothing_had_happened_in_a_storm(
    pools, undisturbed, kind, plans: list[Generation]
) -> None:
    check(kind, pools, undisturbed, plans)
