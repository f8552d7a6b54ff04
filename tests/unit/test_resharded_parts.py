"""A job goes on in another layout from the parts in memory, as if nothing had happened."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic_world import Generation
from kept_world import NODES, KeptWorld, kept_job, one
from layout_world import train
from memory_peers import Fault
from test_kept_parts import assert_undisturbed

from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.checkpointing.tensors import unpack
from unicron_lib.domain.plans import Layout
from unicron_lib.training.effort import Effort
from unicron_lib.training.handover import Fallback, hand_over
from unicron_lib.training.peers import Alone
from unicron_lib.training.rank import Rank

pytestmark = pytest.mark.usefixtures("one_thread")
WHOLE, LINE, STAGES, BOTH = (1, 1), (2, 1), (1, 2), (2, 2)


@pytest.fixture(scope="module")
def undisturbed(one_thread) -> dict[str, torch.Tensor]:
    spec = kept_job(1, 1)
    (alone,), _ = train(spec, Layout(), iterations=spec.train_iters)
    return alone.state()


def left_by(kind: tuple[int, int], directory: Path) -> KeptWorld:
    """A job with one replica, all of whose ranks are gone in an iteration that is neither the first nor the last."""
    world = KeptWorld(kept_job(*kind), directory, replicas=1)
    at = {WHOLE: 40, LINE: 350, STAGES: 120, BOTH: 300}[kind]
    assert not world.live(Generation(size=1, faults=(Fault(rank=0, at=at),)))
    assert world.fired
    world.lose_all()
    return world


@pytest.mark.parametrize(
    ("before", "now", "size"),
    [
        (BOTH, LINE, 2),
        (BOTH, STAGES, 1),
        (BOTH, WHOLE, 2),
        (LINE, STAGES, 2),
        (STAGES, LINE, 1),
        (STAGES, BOTH, 1),
        (WHOLE, BOTH, 2),
        (WHOLE, LINE, 1),
    ],
)
def test_another_layout_goes_on_from_the_newest_parts(
    tmp_path: Path, undisturbed, before: tuple[int, int], now: tuple[int, int], size: int
) -> None:
    old = left_by(before, tmp_path)
    world = KeptWorld(kept_job(*now), tmp_path, replicas=size, after=old)
    source = world.begin_from_memory(size=size)
    assert source.layout == Layout(tp=before[0], pp=before[1])
    assert source.place[1] > 0
    assert world.live(Generation(size=size))
    began = {progress.rank: progress for progress in reversed(world.said)}
    assert {progress.iteration for progress in began.values()} == {source.place[1] + 1}
    origins = {progress.source for progress in began.values()}
    assert any(origin.endswith(f"(resharded from {source.layout.shape})") for origin in origins), origins
    assert_undisturbed(world, undisturbed, replicas=size)


def test_a_rank_reads_nothing_of_what_it_does_not_need(tmp_path: Path, monkeypatch) -> None:
    """Of the layers of the other stage there is not a single slot on the node."""
    old = left_by(BOTH, tmp_path)
    world = KeptWorld(kept_job(*STAGES), tmp_path, replicas=1, after=old)
    source = world.begin_from_memory(size=1)
    for node, stage in zip(NODES, ("pp1of2", "pp0of2"), strict=True):
        for path in (world.houses[node].directory / "tiny").glob(f"*{stage}*"):
            path.unlink()
    assert world.live(Generation(size=1))
    assert min(progress.iteration for progress in world.said) == source.place[1] + 1


@pytest.mark.parametrize("harm", ["gone", "another model's"])
def test_a_part_that_is_no_more_what_it_was_leaves_the_checkpoint(tmp_path: Path, undisturbed, harm: str) -> None:
    old = left_by(LINE, tmp_path)
    world = KeptWorld(kept_job(*STAGES), tmp_path, replicas=1, after=old)
    source = world.begin_from_memory(size=1)
    for node in NODES:
        part = SlotPair(world.houses[node].directory / "tiny", "tp1of2-pp0of1")
        spoil(part, source.place) if harm == "another model's" else shutil.rmtree(part.directory)
    assert world.live(Generation(size=1))
    assert min(progress.iteration for progress in world.said) == 0
    assert_undisturbed(world, undisturbed)


def spoil(part: SlotPair, place: tuple[int, int]) -> None:
    """Another name in it, with all else as it was."""
    with part.reading(place) as (header, data):
        name = next(iter(unpack(data, "slot"))).encode()
        spoiled = bytes(data).replace(name, name[:-1] + b"?", 1)
    part.forget(99)
    claim = part.claim(len(spoiled))
    claim.data[:] = spoiled
    claim.commit(header)


def test_what_a_rank_had_done_in_another_layout_is_accounted_for(tmp_path: Path) -> None:
    world = KeptWorld(kept_job(*WHOLE), tmp_path, replicas=2)
    env = world._environment(0, 2, node="")
    rank = Rank(env, None)
    whole = rank._memory_for(env)
    whole.effort.begin(3, [0, 1, 2])
    whole.effort.finish(1)
    whole.effort.prepare(5)
    whole.was_in, whole.given_up = 5, 2
    assert rank._memory_for(env) is whole
    part = rank._memory_for(replace(env, tp=2))
    assert part is not whole
    assert part.effort == Effort(iteration=3, done={1})
    assert (part.was_in, part.given_up, part.position.is_whole) == (5, 2, False)


@pytest.mark.parametrize(("saved", "lost"), [(2, 3), (3, 2)])
def test_of_what_it_had_done_there_is_lost_what_the_checkpoint_does_not_have(tmp_path: Path, saved: int, lost: int) -> None:
    """It waited in the all-reduce at whose end others have stepped, and saved."""
    world = KeptWorld(kept_job(1, 1), tmp_path)
    assert world.live(one())
    (memory,) = world.people.values()
    memory.effort, memory.was_in, memory.given_up = Effort(iteration=3, done={1}), 5, 2
    memory.position.is_whole = False
    state = {name: tensor.clone() for name, tensor in memory.replica.state().items()}

    def load() -> float:
        memory.replica.load(state)
        return 1.0

    origin = hand_over(
        Alone(),
        memory,
        node="n",
        generation=6,
        num_micro_batches=world.spec.num_micro_batches,
        fallback=Fallback(iteration=saved, name="manifest", load=load, generation=5),
    )
    assert (origin.source, origin.discarded_micro_batches) == ("manifest", lost)
