"""What states in host memory cost a training, and how soon one is back from a peer's memory, beside S3."""

import asyncio
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from unicron_lib.agent.copying import Copying
from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.agent.slot_places import PREFIX, SHARED
from unicron_lib.agent.slot_wire import Get, SlotServer, fetch
from unicron_lib.checkpointing.slot_digest import digest_of
from unicron_lib.checkpointing.slot_header import SlotHeader
from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.checkpointing.tensors import pack_into, packed_bytes, unpack
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.training.effort import Effort
from unicron_lib.training.groups import choose_device, leave
from unicron_lib.training.loop import Work
from unicron_lib.training.position import Position
from unicron_lib.training.replica import Replica
from unicron_lib.training.snapshots import Snapshots
from unicron_lib.training.trial_cost import JOB, Cost, timed, timed_alone

BAR_THROUGHPUT = 0.97
BAR_RESTORE = 5.0
TOKEN = "bench"  # noqa: S105 - both sides are this process
HIDDEN, LAYERS, BATCH, LENGTH = 256, 4, 16, 256
"""A model of 3 million parameters that sees 4,096 tokens an iteration.

Megatron's replicas see 32,768 (1.7 billion parameters, 512 sequences on 32 GPUs) to a million (a trillion on 3,072 GPUs;
Narayanan et al. 2021, table 1), and pay less.
"""
BLOCK = 3
PAIRS = 9
"""So many blocks of iterations each, in turn; the first pair does not count."""
LOOK_S = 0.2


@contextmanager
def slots_with(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[memoryview, Callable[[], float]]]:
    """The memory of a slot that has been written before, as a rank finds it, and what gets the state from a peer's memory.

    That fills the tensors of a rank that has lost them, compares a digest as what comes from S3 does, and returns seconds.
    """
    with _houses() as (here, there, peer):
        header = _filled(there.pair(JOB), state)
        claim = there.pair(JOB).claim(packed_bytes(state))
        assert claim is not None
        pack_into(state, claim.data)

        def restore() -> None:
            fetch(peer, TOKEN, here.pair(JOB), Get(job=JOB, generation=header.generation, iteration=header.iteration))
            with here.pair(JOB).reading(header.place) as (_, found):
                fill(state, unpack(found, "peer"))

        def from_peer() -> float:
            elapsed_s = timed(restore)
            here.wipe()
            return elapsed_s

        yield claim.data, from_peer


def fill(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Copy a state that was found into the tensors of a rank."""
    for name, tensor in own.items():
        tensor.copy_(found[name])


def restored(near: Sequence[float], far: Sequence[float]) -> Cost:
    """How long a rank takes to have its state again, from a peer's memory and from S3, round by round."""
    return Cost(
        what="restore of a lost rank, from a peer's memory",
        value=statistics.median(near),
        unit="s",
        beside="from S3",
        other=statistics.median(far),
        ratio=statistics.median(store / peer for peer, store in zip(near, far, strict=True)),
        bar=BAR_RESTORE,
    )


def training() -> Iterator[Cost]:
    """Train with a copy into memory after each iteration, which a peer gets in the background, and without, in turn."""
    spec = JobSpec(
        job=JOB,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        seq_length=LENGTH,
        global_batch_size=BATCH,
        micro_batch_size=2,
        memory_interval=1,
    )
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        pairs = list(_pairs(spec))[1:]  # the first one takes memory that later ones have
    finally:
        leave()
    kept, plain = (statistics.median(times) / BLOCK for times in zip(*pairs, strict=True))
    yield Cost(
        what="an iteration, its state kept in memory",
        value=kept,
        unit="s",
        beside="without",
        other=plain,
        ratio=statistics.median(plain / kept for kept, plain in pairs),
        bar=BAR_THROUGHPUT,
    )


def _pairs(spec: JobSpec) -> Iterator[tuple[float, float]]:
    """Seconds of a block of iterations with copies, and of one without; either is the first as often."""
    replica, work = Replica(spec, choose_device(0)), Work(spec, replica=0, num_replicas=1)
    iterations = count()

    def block(snapshots: Snapshots | None) -> float:
        def run() -> None:
            for _ in range(BLOCK):
                _iterate(replica, work, next(iterations), snapshots)

        return timed_alone(run)

    def kept() -> float:
        with _copied(here, peer):
            elapsed_s = block(snapshots)
        snapshots.settle()
        return elapsed_s

    with _houses() as (here, _, peer):
        snapshots = Snapshots(here.pair(JOB), spec)
        for _ in range((PAIRS + 1) // 2):
            yield kept(), block(None)
            without = block(None)
            yield kept(), without


def _iterate(replica: Replica, work: Work, iteration: int, snapshots: Snapshots | None) -> None:
    effort = Effort()
    replica.begin()
    effort.begin(iteration, work.micro_batches)
    work.do(replica, effort)
    loss = replica.reduced().loss
    replica.step(iteration)
    if snapshots and snapshots.is_due(iteration):
        snapshots.keep(Position(iteration=iteration, loss=loss, generation=1, is_whole=True), replica.state())


def _filled(pair: SlotPair, state: Mapping[str, torch.Tensor]) -> SlotHeader:
    claim = pair.claim(packed_bytes(state))
    assert claim is not None
    pack_into(state, claim.data)
    header = SlotHeader(
        job=JOB,
        generation=0,
        iteration=1,
        consumed_samples=0,
        loss=0.0,
        num_bytes=len(claim.data),
        digest=digest_of(claim.data),
    )
    claim.commit(header)
    return header


@contextmanager
def _houses() -> Iterator[tuple[SlotHouse, SlotHouse, str]]:
    """The slots of this node, those of a peer, and the address at which the peer takes and gives states."""
    with tempfile.TemporaryDirectory(dir=SHARED, prefix=f"{PREFIX}{os.geteuid()}-bench-") as folder:
        here, there = SlotHouse(Path(folder) / "here"), SlotHouse(Path(folder) / "there")
        server = SlotServer(house=there, token=TOKEN, refusal=lambda _: "")
        server.start("127.0.0.1")
        try:
            yield here, there, f"127.0.0.1:{server.port}"
        finally:
            server.close()


@contextmanager
def _copied(house: SlotHouse, peer: str) -> Iterator[None]:
    """Copies go to the peer meanwhile, as an agent sends them."""
    copying, over = Copying(house, TOKEN), threading.Event()
    copying.follow(JOB, (peer,))

    def run() -> None:
        while not over.wait(LOOK_S):
            asyncio.run(copying.look())

    thread = threading.Thread(target=run, name="copying", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        copying.close()
