"""Ranks of a layout in one process: their replicas, in threads of a stage, over peers in memory."""

from collections.abc import Callable
from typing import Any

import torch
from memory_peers import Fault, Room
from stage import Stage

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.training.effort import Effort
from unicron_lib.training.groups import members_of
from unicron_lib.training.loop import Work
from unicron_lib.training.reduction import sum_buckets
from unicron_lib.training.replica import Reduced, Replica
from unicron_lib.training.siblings import Siblings

CPU = torch.device("cpu")


def replicas_of(spec: JobSpec, layout: Layout, make: type[Replica] = Replica) -> list[Replica]:
    return [make(spec, CPU, Siblings(layout, layout.place(rank))) for rank in range(layout.num_gpus)]


def together(
    layout: Layout, body: Callable[[int, dict[str, Any]], Any], *, seed: int = 0, faults: tuple[Fault, ...] = ()
) -> dict[int, Any]:
    """What each rank's `body` returns, given its number and its groups by name, or the exception that has ended it."""
    stage = Stage(seed)
    room = Room(stage, layout.num_gpus, faults)

    def live(rank: int) -> Any:
        groups = {name: room.peers(rank, members) for name, members in members_of(layout, rank).items()}
        groups["peers"] = room.peers(rank)
        try:
            return body(rank, groups)
        finally:
            room.leave(rank)

    return stage.run({rank: lambda r=rank: live(r) for rank in range(layout.num_gpus)})


def train(spec: JobSpec, layout: Layout, *, iterations: int, seed: int = 0) -> tuple[list[Replica], list[list[Reduced]]]:
    """Train undisturbed from the initial state; the replicas, and what each of their ranks was told in each iteration."""
    replicas = replicas_of(spec, layout)

    def body(rank: int, groups: dict[str, Any]) -> list[Reduced]:
        replica, place = replicas[rank], layout.place(rank)
        work, effort, told = Work(spec, replica=place.dp, num_replicas=layout.dp), Effort(), []
        with replica.siblings.met(line=groups["line"], replica=groups["replica"]):
            for iteration in range(iterations):
                replica.begin()
                effort.begin(iteration, work.micro_batches)
                work.do(replica, effort)
                sum_buckets(replica, groups["column"], effort, generation=1)
                told.append(replica.reduced())
                replica.step(iteration)
        return told

    told = together(layout, body, seed=seed)
    for outcome in told.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return replicas, [told[rank] for rank in range(layout.num_gpus)]


def whole_state(replicas: list[Replica], layout: Layout) -> dict[str, torch.Tensor]:
    """The whole state, from the ranks of the first replica; what several of them have must be equal."""
    state: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    for replica in replicas[: layout.replica_size]:
        for name, tensor in replica.state().items():
            piece = replica.slices[name]
            whole = state.setdefault(name, torch.zeros(piece.whole, dtype=tensor.dtype))
            seen = known.setdefault(name, torch.zeros(piece.whole, dtype=torch.bool))
            place = tuple(slice(first, first + size) for first, size in zip(piece.offset, piece.size, strict=True))
            assert torch.equal(whole[place][seen[place]], tensor[seen[place]]), name
            whole[place], seen[place] = tensor, True
    assert all(bool(seen.all()) for seen in known.values())
    return state
