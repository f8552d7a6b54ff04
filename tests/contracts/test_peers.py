"""Peers in memory, which the tests of exactness run on, do what those of a torch process group do."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_peers import Fault, Killed, Room
from stage import Stage

from unicron_lib.training.groups import TorchPeers, leave
from unicron_lib.training.peers import CollectiveFailed, Peers

Body = Callable[[Peers], Any]
DEADLINE_S = 60.0


def in_memory(size: int, body: Body, dying: int | None = None) -> dict[int, Any]:
    stage = Stage()
    room = Room(stage, size, (Fault(rank=dying, at=1),) if dying is not None else ())

    def live(rank: int) -> Any:
        try:
            peers = room.peers(rank)
            peers.exchange(b"")
            if rank == dying:
                room.pass_point(rank)
            return body(peers)
        except CollectiveFailed as error:
            return type(error).__name__
        finally:
            room.leave(rank)

    outcomes = stage.run({rank: lambda r=rank: live(r) for rank in range(size)})
    return {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, Killed)}


def on_gloo(size: int, body: Body, dying: int | None = None) -> dict[int, Any]:
    """Forked processes. What they return comes by a queue."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = context.SimpleQueue()
    ranks = [context.Process(target=_live, args=(rank, size, port, body, told, dying), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
        assert process.exitcode is not None, "a rank hangs"
    return dict(told.get() for rank in range(size) if rank != dying)


def _live(rank: int, size: int, port: int, body: Body, told, dying: int | None) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == (0 if dying != 0 else 1), timeout=timedelta(seconds=DEADLINE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE_S))
    peers = TorchPeers(torch.device("cpu"))
    peers.exchange(b"")  # all are here
    if rank == dying:
        os._exit(9)
    try:
        outcome = body(peers)
    except CollectiveFailed as error:
        outcome = type(error).__name__
    told.put((rank, outcome))
    leave()
    os._exit(0)


@pytest.fixture(params=[in_memory, on_gloo])
def together(request: pytest.FixtureRequest):
    return request.param


def test_a_sum_is_everybodys_and_the_same_everywhere(together) -> None:
    def body(peers: Peers):
        part = torch.arange(5, dtype=torch.float64) * (peers.rank + 1) / 3
        buffer = torch.cat([part, torch.full((2,), 7.0, dtype=torch.float64)])
        peers.sum(buffer[:5])
        return buffer.tolist()

    outcomes = together(3, body)
    assert outcomes[0] == pytest.approx([0, 2, 4, 6, 8, 7, 7])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_words_of_any_length_are_exchanged_by_rank(together) -> None:
    words = [b"", b"a\0", b"long " * 100]
    outcomes = together(3, lambda peers: (peers.rank, peers.size, peers.exchange(words[peers.rank])))
    assert outcomes == {rank: (rank, 3, words) for rank in range(3)}


def test_a_tensor_goes_from_one_rank_to_another_one_and_back(together) -> None:
    def body(peers: Peers):
        tensor = torch.full((4,), float(peers.rank))
        if peers.rank == 2:
            peers.send(tensor, 0)
            peers.receive(tensor, 0)
        elif peers.rank == 0:
            arrived = torch.empty(4)
            peers.receive(arrived, 2)
            peers.send(arrived + 1, 2)
        return tensor.tolist()

    assert together(3, body) == {0: [0.0] * 4, 1: [1.0] * 4, 2: [3.0] * 4}


def test_two_ranks_swap_tensors_though_neither_waits_for_the_other_one_to_take(together) -> None:
    def body(peers: Peers):
        if peers.rank == 1:
            return None
        mine, theirs = torch.full((100_000,), float(peers.rank)), torch.empty(100_000)
        for _ in range(3):
            peers.swap(mine, theirs, 2 - peers.rank)
            mine = theirs + 1
        return float(mine.mean())

    assert together(3, body) == {0: 5.0, 1: None, 2: 3.0}


@pytest.mark.parametrize("dying", [0, 1])
def test_whoever_needs_a_rank_that_is_gone_fails_now_and_later(together, dying: int) -> None:
    def body(peers: Peers):
        found = []
        for _ in range(2):
            try:
                peers.sum(torch.ones(3))
            except CollectiveFailed:
                found.append("failed")
        return found

    assert together(2, body, dying) == {1 - dying: ["failed", "failed"]}


def test_two_ranks_go_on_with_each_other_when_a_third_one_is_gone(together) -> None:
    def body(peers: Peers):
        tensor = torch.full((2,), float(peers.rank))
        if peers.rank == 0:
            peers.send(tensor, 1)
        elif peers.rank == 1:
            peers.receive(tensor, 0)
        return tensor.tolist()

    assert together(3, body, 2) == {0: [0.0, 0.0], 1: [0.0, 0.0]}
