"""The ranks of a node: what each is, what it told last, how to reach it."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from unicron_lib.agent.forks import Forked
from unicron_lib.agent.left_lines import LineReader
from unicron_lib.agent.messages import RankInfo
from unicron_lib.agent.rank_messages import Progress, RankOrder, rank_order
from unicron_lib.agent.repeats import Repeats
from unicron_lib.detection.sections import Limits

log = logging.getLogger(__name__)
RankKey = tuple[str, int, int]
CONNECT_GRACE_S = 0.05
"""For a rank that failed so soon that its connection has not been accepted yet."""
READ_GRACE_S = 2.0
"""For reading what a dead rank has left in its connection."""


class Phase(StrEnum):
    """What a rank told last about itself."""

    RUNNING = "running"
    PARKED = "parked"
    FAILED = "failed"
    DRAINED = "drained"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Rank:
    """A rank that this agent started; `iteration` is the last complete one, -1 before the first.

    A parked one keeps the gradients of `micro_batches` of the iteration under way; it may live on in the generation `held_for`,
    which may not be that of today. What it does not send is read in `left`. `silent` is set when its connection has ended and
    was read to the end, `judged` when its end has been dealt with. One that `is_command` runs its job's command: it may never
    say a word, and can park only if it has said that it `parks`. One that `needs_peers` may wait for others in its own part of
    an iteration, too.
    """

    job: str
    generation: int
    rank: int
    gpu: int
    limits: Limits = field(default_factory=Limits)
    is_command: bool = False
    parks: bool = False
    world_size: int = 0
    needs_peers: bool = False
    phase: Phase = Phase.RUNNING
    iteration: int = -1
    manifest: str | None = None
    has_answered: bool = False
    micro_batches: int = 0
    held_for: int = 0
    asked_to_stop: bool = False
    progress: Progress | None = None
    process: Forked | None = None
    writer: asyncio.StreamWriter | None = None
    left: LineReader | None = None
    orders: list[RankOrder] = field(default_factory=list)
    judged: bool = False
    repeats: Repeats = field(default_factory=Repeats)
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    silent: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> RankKey:
        """Job, generation and rank."""
        return self.job, self.generation, self.rank

    @property
    def pid(self) -> int:
        """Its process, 0 before it has one."""
        return self.process.pid if self.process else 0

    @property
    def is_alive(self) -> bool:
        """Whether it has a process, or is about to."""
        return self.process is None or self.process.exit_code is None

    @property
    def ended_well(self) -> bool:
        """Whether its process has ended with exit code 0."""
        return self.process is not None and self.process.exit_code == 0

    @property
    def can_park(self) -> bool:
        """Whether it understands that it is to park."""
        return self.parks or not self.is_command

    @property
    def is_parked(self) -> bool:
        """Whether it waits with its state in memory, and can be told what comes next."""
        return self.phase is Phase.PARKED and self.is_alive and not self.silent.is_set()

    async def last_words(self) -> None:
        """Wait until everything that a rank whose process has ended had said is read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_GRACE_S):
                await self.connected.wait()
        if self.connected.is_set():
            self._hear_no_more()
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_GRACE_S):
                    await self.silent.wait()

    @property
    def info(self) -> RankInfo:
        """As the controller is told."""
        return RankInfo(job=self.job, generation=self.generation, rank=self.rank, pid=self.pid, gpu=self.gpu)

    def order(self, order: RankOrder) -> None:
        """Send an order, as soon as the rank has connected."""
        self.orders.append(order)
        self._send_orders()

    def connect(self, writer: asyncio.StreamWriter) -> None:
        """The rank's connection is here: deliver what has waited for it."""
        self.writer = writer
        self.connected.set()
        self._send_orders()

    def disconnect(self) -> None:
        """The connection has ended and everything in it was read."""
        self.writer = None
        self.silent.set()

    def _hear_no_more(self) -> None:
        """End the connection behind what is in it already: a child that the rank has left may hold its other end open."""
        if self.writer is not None:
            with suppress(OSError):
                self.writer.get_extra_info("socket").shutdown(socket.SHUT_RD)

    def _send_orders(self) -> None:
        if self.writer is None:
            return
        while self.orders:
            with suppress(ConnectionError):
                self.writer.write(rank_order.dump_json(self.orders.pop(0)) + b"\n")


class Ranks:
    """All ranks that this agent has started and not forgotten, dead ones included."""

    def __init__(self) -> None:
        self._ranks: dict[RankKey, Rank] = {}

    def add(self, rank: Rank) -> None:
        """Take in a new rank."""
        self._ranks[rank.key] = rank

    def find(self, job: str, generation: int, rank: int) -> Rank | None:
        """The rank, dead or alive."""
        return self._ranks.get((job, generation, rank))

    def forget(self, rank: Rank) -> None:
        """Drop a rank from the table."""
        self._ranks.pop(rank.key, None)
        if rank.left is not None:
            rank.left.close()
            rank.left = None

    def renew(self, rank: Rank, *, generation: int, number: int, limits: Limits) -> None:
        """A parked rank takes its place in a newer generation: what it said and was told in the older one is over."""
        self.forget(rank)
        rank.generation, rank.rank, rank.limits = generation, number, limits
        rank.phase, rank.asked_to_stop = Phase.RUNNING, False
        rank.progress, rank.manifest, rank.micro_batches = None, None, 0
        rank.repeats = Repeats()
        self.add(rank)

    @property
    def alive(self) -> tuple[Rank, ...]:
        """Ranks that have a process, or are about to."""
        return self.where(lambda rank: rank.is_alive)

    def below(self, job: str, generation: int) -> tuple[Rank, ...]:
        """Ranks of the generations of `job` before `generation`."""
        return self.where(lambda rank: rank.job == job and rank.generation < generation)

    def where(self, wanted: Callable[[Rank], bool]) -> tuple[Rank, ...]:
        """The ranks that are wanted, in the order of their start."""
        return tuple(rank for rank in self._ranks.values() if wanted(rank))
