"""Copies from rank to rank are checked where they arrive."""

import pytest
import torch
from memory_peers import Room
from stage import Stage

from unicron_lib.training import transfer
from unicron_lib.training.transfer import CopyDamaged, receive_checked, send_checked


def copied(tensors: list[torch.Tensor], into: list[torch.Tensor], *, damage: int | None = None):
    """What the receiver's call has led to; `damage` is the number of the piece of which one bit is turned on the way."""
    stage = Stage()
    room = Room(stage, 2)
    sender, receiver = room.peers(0), room.peers(1)
    pieces = iter(range(1000))
    receive = receiver.receive

    def receive_damaged(tensor: torch.Tensor, source: int) -> None:
        receive(tensor, source)
        if next(pieces) == damage:
            tensor.view(torch.uint8)[-1] ^= 1

    receiver.receive = receive_damaged
    return stage.run({0: lambda: send_checked(sender, tensors, 1), 1: lambda: receive_checked(receiver, into, 0)})[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_arrive_in_pieces_bit_by_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 40)
    tensors = [torch.randn(23, dtype=dtype), torch.randn(7, dtype=dtype)]
    into = [torch.empty(23, dtype=dtype), torch.empty(7, dtype=dtype)]
    assert copied(tensors, into) == 30 * dtype.itemsize
    assert all(torch.equal(a, b) for a, b in zip(tensors, into, strict=True))


@pytest.mark.parametrize("piece", [0, 2, 4])
def test_one_bit_that_is_turned_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 40)
    error = copied([torch.randn(50)], [torch.empty(50)], damage=piece)
    assert isinstance(error, CopyDamaged)
    assert "200 bytes that rank 1 received from rank 0" in str(error)
