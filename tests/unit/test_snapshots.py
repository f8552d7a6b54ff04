"""A rank's copies of its state in memory: when, what, and what happens where there is no room."""

import os
from pathlib import Path

import pytest
import torch

from unicron_lib.checkpointing import slots
from unicron_lib.checkpointing.room import Room
from unicron_lib.checkpointing.slot_header import HEADER_BYTES
from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.checkpointing.tensors import unpack
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.planning.cadence import SHARE
from unicron_lib.training.position import Position
from unicron_lib.training.replica import Replica
from unicron_lib.training.snapshots import Cadence, Snapshots

SPEC = JobSpec(job="a", num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16, memory_interval=1)


def at(iteration: int, generation: int = 1) -> Position:
    return Position(iteration=iteration, loss=2.5, generation=generation, is_whole=True)


@pytest.fixture
def pair(tmp_path: Path) -> SlotPair:
    return SlotPair(tmp_path / "a")


@pytest.fixture(scope="module")
def replica() -> Replica:
    made = Replica(SPEC, torch.device("cpu"))
    with made.filling() as flats:
        for number, flat in enumerate(flats):
            flat.copy_(torch.arange(len(flat)) + number)
    return made


def test_the_state_comes_back_bit_by_bit(pair: SlotPair, replica: Replica) -> None:
    mine = Snapshots(pair, SPEC)
    assert mine.keep(at(7, 3), replica.state())
    mine.settle()
    (header,) = pair.found()
    assert (header.place, header.consumed_samples, header.loss) == ((3, 7), 8 * SPEC.global_batch_size, 2.5)
    newcomer, position = Replica(SPEC, torch.device("cpu")), Position()
    assert Snapshots(SlotPair(pair.directory), SPEC).restore((3, 7), newcomer, position)
    assert position == at(7, 3)
    assert all(torch.equal(tensor, newcomer.state()[name]) for name, tensor in replica.state().items())


def test_all_ranks_of_a_node_restore_from_the_one_slot_at_once(pair: SlotPair, replica: Replica) -> None:
    mine = Snapshots(pair, SPEC)
    mine.keep(at(7), replica.state())
    mine.settle()
    with pair.reading((1, 7)):
        for _ in range(2):
            newcomer = Replica(SPEC, torch.device("cpu"))
            assert Snapshots(SlotPair(pair.directory), SPEC).restore((1, 7), newcomer, Position())
            assert all(torch.equal(tensor, newcomer.state()[name]) for name, tensor in replica.state().items())


def test_what_is_not_there_is_not_restored(pair: SlotPair, replica: Replica) -> None:
    position = Position()
    assert not Snapshots(pair, SPEC).restore((3, 7), replica, position)
    assert not position.is_whole


def test_another_model_s_state_is_not_taken(pair: SlotPair, replica: Replica) -> None:
    mine = Snapshots(pair, SPEC)
    mine.keep(at(7), {"param.other": torch.ones(5)})
    mine.settle()
    position = Position()
    assert not mine.restore((1, 7), replica, position)
    assert not position.is_whole


def test_a_cut_off_slot_is_not_taken(pair: SlotPair, replica: Replica) -> None:
    mine = Snapshots(pair, SPEC)
    mine.keep(at(7), replica.state())
    mine.settle()
    os.truncate(pair.directory / "0.slot", HEADER_BYTES + 10)
    assert not mine.restore((1, 7), replica, Position())


def test_a_node_without_room_trains_on_and_says_so_once(pair: SlotPair, replica: Replica, monkeypatch, caplog) -> None:
    monkeypatch.setattr(slots, "room_of", lambda _: Room(total=100, available=50, left=10, held=0))
    mine = Snapshots(pair, SPEC)
    assert not any(mine.keep(at(iteration), replica.state()) for iteration in range(3))
    (record,) = caplog.records
    assert record.message.startswith("no state is kept in memory: ")
    assert record.message.endswith("; the training goes on without")


def test_without_a_directory_or_wish_nothing_is_kept(pair: SlotPair, replica: Replica) -> None:
    assert not Snapshots(None, SPEC).is_due(1)
    assert not Snapshots(None, SPEC).keep(at(1), replica.state())
    assert not Snapshots(pair, JobSpec(job="a", memory_interval=0)).is_due(1)


# --- when


@pytest.mark.parametrize(("interval", "due"), [(1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [3]), (0, [])])
def test_every_so_many_iterations(interval: int, due: list[int]) -> None:
    cadence = Cadence(interval=interval)
    assert [iteration for iteration in range(6) if cadence.is_due(iteration, 0.0)] == due


def test_as_often_as_takes_a_small_part_of_the_time() -> None:
    cadence, now, copying_s = Cadence(interval=None), 0.0, 0.0
    for iteration in range(10_000):
        now += 0.1
        if cadence.is_due(iteration, now):
            cadence.note(iteration, now, now + 0.02)
            now, copying_s = now + 0.02, copying_s + 0.02
    assert 0.8 * SHARE < copying_s / now <= 1.01 * SHARE


def test_cheap_copies_are_made_each_time() -> None:
    cadence = Cadence(interval=None)
    cadence.note(0, 1.0, 1.0005)
    assert cadence.is_due(1, 1.1)


class Cudart:
    """Stands in for CUDA's runtime: takes memory that it shall pin, and says `refusal`."""

    def __init__(self, refusal: int = 0) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[int] = []
        self._refusal = refusal

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's own name
        self.pinned.append((address, size))
        return self._refusal + flags

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unpinned.append(address)
        return 0


@pytest.mark.parametrize("refusal", [0, 2])
def test_each_slot_of_a_gpu_s_state_is_pinned_once(refusal: int, pair: SlotPair, monkeypatch, caplog) -> None:
    cudart = Cudart(refusal)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    mine, addresses = Snapshots(pair, SPEC), set()
    for iteration in range(4):
        claim = pair.claim(5000)
        mine._pin(claim, torch.device("cuda", 0))
        mine._pin(claim, torch.device("cpu"))
        addresses.add((torch.frombuffer(claim.data, dtype=torch.uint8).data_ptr(), 5000))
        mine._complete([claim], (1, iteration), 0.5)
    assert len(addresses) == 2
    assert sorted(cudart.pinned) == sorted(addresses)
    assert len(caplog.records) == (2 if refusal else 0)


def test_what_stood_in_for_a_slot_is_unpinned_before_its_address_may_be_another_s(pair: SlotPair, monkeypatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    mine = Snapshots(pair, SPEC)
    for iteration in range(8):
        claim = pair.claim(5000)
        mine._pin(claim, torch.device("cuda", 0))
        mine._complete([claim], (1, iteration), 0.5)
        if iteration == 3:
            (pair.directory / "0.slot").unlink()
    assert len(cudart.pinned) == 4
    assert cudart.unpinned == [address for address, _ in cudart.pinned[:2]]
    assert len({address for address, _ in cudart.pinned[1:3]}) == 2, "what is pinned stays mapped"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_writes_into_pinned_slots(pair: SlotPair) -> None:
    mine = Snapshots(pair, SPEC)
    state = {"param.w": torch.arange(1 << 20, dtype=torch.float32, device="cuda")}
    for iteration in range(4):
        assert mine.keep(at(iteration), state)
        mine.settle()
    slots_of_both = [torch.frombuffer(mapped.view, dtype=torch.uint8)[HEADER_BYTES:] for mapped in pair._mapped.values()]
    assert [memory.is_pinned() for memory in slots_of_both] == [True, True]
    with pair.reading((1, 3)) as (_, data):
        assert torch.equal(unpack(data, "k")["param.w"], state["param.w"].cpu())
