"""Ranks of cut replicas keep their parts of one iteration in memory, and go on from there as if nothing had happened."""

from pathlib import Path

import pytest
import torch
from elastic_world import Generation
from kept_world import NODES, KeptWorld, Prompt, kept_job, one
from layout_world import train
from memory_peers import Fault

from unicron_lib.checkpointing.slices import TensorSlice
from unicron_lib.checkpointing.slots import parts_in
from unicron_lib.domain.plans import Layout
from unicron_lib.training.ledger import check_ledger

pytestmark = pytest.mark.usefixtures("one_thread")

CRASHES = {(2, 1): Fault(rank=1, at=350), (1, 2): Fault(rank=1, at=120), (2, 2): Fault(rank=1, at=300)}
"""For each kind of replica one in an iteration that is neither the first nor the last, and not behind one that was kept."""


@pytest.fixture(scope="module")
def undisturbed(one_thread) -> dict[str, torch.Tensor]:
    spec = kept_job(1, 1)
    (alone,), _ = train(spec, Layout(), iterations=spec.train_iters)
    return alone.state()


def assert_undisturbed(world: KeptWorld, undisturbed: dict[str, torch.Tensor], *, replicas: int = 1) -> None:
    assert check_ledger(world.directory, world.spec) == []
    ends = [memory for memory in world.people.values() if memory.position.iteration == world.spec.train_iters - 1]
    assert len(ends) == replicas * world.spec.layout(1).replica_size
    for replica in (memory.replica for memory in ends):
        for name, tensor in replica.state().items():
            piece = replica.slices[name]
            expected = undisturbed[name][piece.within(TensorSlice.all_of(piece.whole))]
            assert float((tensor - expected).abs().max()) <= 1e-12, name


@pytest.mark.parametrize("kind", CRASHES)
@pytest.mark.parametrize("left", ["others live on", "all are gone"])
def test_a_lost_replica_goes_on_from_the_newest_parts_of_one_iteration(
    tmp_path: Path, undisturbed, kind: tuple[int, int], left: str
) -> None:
    world = KeptWorld(kept_job(*kind, memory_interval=2), tmp_path)
    assert not world.live(one(faults=(CRASHES[kind],)))
    assert {memory.position.iteration for memory in world.people.values()} == {2}
    given_up = sum(len(memory.effort.done) for memory in world.people.values())
    assert given_up > 0
    if left == "all are gone":
        world.lose_all()
        given_up = 0
    world.slot = world.find().place
    assert world.slot == (1, 1)
    told = len(world.said)
    assert world.live(one())
    began = world.said[told : told + world.spec.layout(1).replica_size]
    assert {progress.iteration for progress in began} == {2}
    assert {progress.source.partition(" of ")[0] for progress in began} == {"slot"}
    assert sum(progress.discarded_micro_batches for progress in began) == given_up
    assert_undisturbed(world, undisturbed)


def test_a_part_that_only_another_node_has_is_given_by_a_rank_there(tmp_path: Path, undisturbed) -> None:
    """Two replicas, all gone, and one node has lost a part that it had."""
    world = KeptWorld(kept_job(2, 1), tmp_path)
    assert not world.live(Generation(size=2, faults=(Fault(rank=1, at=200),)))
    world.lose_all()
    world.slot = world.find().place
    part = world.houses[NODES[0]].pair(world.spec.job, "tp0of2-pp0of1")
    part.forget(99)
    told = len(world.said)
    assert world.live(Generation(size=2))
    began = {progress.rank: progress for progress in world.said[told : told + 4]}
    assert {progress.iteration for progress in began.values()} == {world.slot[1] + 1}
    assert check_ledger(world.directory, world.spec) == []


def test_who_is_not_through_puts_it_off_for_all(tmp_path: Path, monkeypatch) -> None:
    world = KeptWorld(kept_job(2, 1), tmp_path)
    kept: list[tuple[str, int]] = []

    def keep(self, position, state, *, travels):
        kept.append((self._part, position.iteration))
        self.is_slow = self._part.startswith("tp1") and position.iteration == 1
        return True

    monkeypatch.setattr(Prompt, "keep", keep)
    assert world.live(one())
    assert sorted(kept) == [(f"tp{place}of2-pp0of1", iteration) for place in (0, 1) for iteration in (0, 1)]


def test_the_next_parts_travel_when_all_of_the_last_ones_have(tmp_path: Path, monkeypatch) -> None:
    world = KeptWorld(kept_job(2, 1, train_iters=9), tmp_path, keeps=2)
    usual, sent = Prompt.keep, []

    def keep(self, position, state, *, travels):
        found = usual(self, position, state, travels=travels)
        self.settle()
        if travels:
            sent.append((self._part[:3], position.iteration))
        if (self._part[:3], position.iteration) in {("tp0", 2), ("tp1", 4), ("tp1", 6)}:
            self._travelling.mark_travelled(self._travelling.found()[0].place)
        return found

    monkeypatch.setattr(Prompt, "keep", keep)
    assert world.live(one())
    assert sorted(sent) == [("tp0", 0), ("tp0", 5), ("tp1", 0), ("tp1", 5)]
    sent = {
        part[:3]: house.travelling("tiny", part)
        for house in world.houses.values()
        for part in parts_in(house.directory / "tiny")
    }
    assert {part: (slot.found()[0].place, slot.has_travelled) for part, slot in sent.items()} == {
        "tp0": ((1, 5), False),
        "tp1": ((1, 5), True),
    }
    asides = [path.name for house in world.houses.values() for path in house.directory.glob("tiny/*.3.slot")]
    assert sorted(asides) == ["tp0of2-pp0of1.3.slot", "tp1of2-pp0of1.3.slot"]
