"""The controller of a storm, and the health tasks that journal what agents observe; the parts that decide are production's."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from storm_kernel import HostClock, Kernel, Network, Process, Work
from storm_node import Node
from storm_store import Store

from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.messages import AgentHello, Heartbeat, NodeUnreachable, Observation, RankResumed, Reply
from unicron_lib.agent.rank_messages import RankFinished
from unicron_lib.controller.liveness import Contact, Stepping, Verdict, judge
from unicron_lib.controller.observations import PendingObservations
from unicron_lib.controller.sight import Sight
from unicron_lib.detection.classify import classify
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import (
    Event,
    FailureDetected,
    JobFinished,
    JobResumed,
    NodeCleared,
    NodeJoined,
    NodeSettled,
    NodeSuspected,
)
from unicron_lib.domain.flapping import snooze_until
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.errors import IllegalTransition, StoreError
from unicron_lib.journal import Journal

BLIND_S = 15.0
ORPHAN_AGE_S = 1.5
SNOOZE_S = 15.0
"""What is 10 minutes by default: a storm is short."""
WATCHED = frozenset({NodeStatus.READY, NodeStatus.SUSPECT, NodeStatus.SNOOZED, NodeStatus.LEAVING, NodeStatus.QUARANTINED})


@dataclass(eq=False)
class Record:
    """What the controller knows of one life of a node."""

    hello: AgentHello
    heard_at: float
    link: int = 0
    joined: bool = False
    ended_at: float | None = None
    suspected: bool = False
    lost: bool = False
    dialled: bool = True
    settles_at: float | None = None

    @property
    def contact(self) -> Contact:
        return Contact(heard_at=self.heard_at, ended_at=self.ended_at, ending="it broke", dialled=self.dialled)


@dataclass(eq=False)
class Controller:
    """It holds no truth: a crash takes its memory, its connections and what it had not written yet."""

    kernel: Kernel
    network: Network
    store: Store
    nodes: dict[str, Node]
    stepping: Callable[[str], Stepping | None]
    is_up: bool = False
    links: int = 0
    replies: dict[str, list[list[Reply | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = HostClock(self.kernel)
        self.start()

    def start(self) -> None:
        self.is_up, self.remembers = True, False
        self.records: dict[str, Record] = {}
        self.pending, self.sight = PendingObservations(), Sight(blind_s=BLIND_S)
        self.queue: deque[tuple[Event, Callable[[bool], None]]] = deque()
        self.journal = Journal(self.store)
        self.process = self.kernel.start("controller", self._work())

    def crash(self) -> None:
        self.is_up = False
        self.kernel.kill(self.process)
        self._break_replies(*self.replies)
        for node in self.nodes.values():
            node.link = 0

    def _break_replies(self, *nodes: str) -> None:
        for node in nodes:
            for box in self.replies.pop(node, ()):
                box.append(None)

    # --- what agents say

    def accept(self, node: Node) -> int:
        if not self.remembers:
            return 0
        hello, now = node.hello, self.kernel.now
        known = self.records.get(hello.node)
        if known and known.hello.boot == hello.boot and known.lost:
            self._give_up(node)
            return 0
        if known is None or known.hello.boot != hello.boot:
            known = self.records[hello.node] = Record(hello=hello, heard_at=now)
        self.links += 1
        known.hello, known.link, known.heard_at, known.ended_at, known.dialled = hello, self.links, now, None, True
        self._break_replies(hello.node)
        self._record(self._arrival(hello), lambda is_new: self._admit(node, known, is_new=is_new))
        return self.links

    def _arrival(self, hello: AgentHello) -> NodeJoined:
        known, now = self.journal.state.nodes.get(hello.node), self.clock()
        return NodeJoined(
            id=f"joined/{hello.node}/{hello.boot}",
            at=now,
            node=hello.node,
            boot=hello.boot,
            address=hello.address,
            num_gpus=hello.num_gpus,
            pool=hello.pool,
            snoozed_until=snooze_until(known, now, snooze_s=SNOOZE_S),
        )

    def _admit(self, node: Node, record: Record, *, is_new: bool) -> None:
        mine = self.journal.state.nodes.get(record.hello.node)
        was_lost = mine is not None and mine.boot == record.hello.boot and mine.status is NodeStatus.LOST
        lost = record.lost or self.pending.knows(f"{record.hello.node}/{record.hello.boot}/-1")
        if lost or (not is_new and was_lost):
            if node.outbox.boot == record.hello.boot:
                self._give_up(node)
            return
        if mine is not None and mine.boot == record.hello.boot and mine.status is NodeStatus.SNOOZED:
            record.settles_at = self.kernel.now + min(mine.snoozed_until - self.clock(), SNOOZE_S)
        record.joined = True

    def _give_up(self, node: Node) -> None:
        """An agent that learns that it was declared lost ends its ranks, and begins a new life."""
        self.kernel.tell(f"{node.name} learns that it was declared lost")
        node.begin_life()

    def hear(self, node: Node, link: int, boot: str, message: object) -> None:
        record = self.records.get(node.name)
        if not self.is_up or record is None or record.hello.boot != boot:
            return
        if record.lost:
            node.hang_up(link)
            return
        if isinstance(message, Observation):
            if not self.pending.add(message, now=self.kernel.now):
                self._acknowledge(node, (message.seq,))
        elif isinstance(message, Heartbeat) and link == record.link:
            record.hello = AgentHello(**{**_fields(record.hello), "ranks": message.ranks})
        if link == record.link:
            record.heard_at = self.kernel.now

    def acknowledge(self, observation: Observation) -> None:
        for seen in self.pending.acknowledge([observation.id]):
            if seen.seq >= 0 and self.nodes[seen.node].outbox.boot == seen.boot:
                self._acknowledge(self.nodes[seen.node], (seen.seq,))

    def _acknowledge(self, node: Node, seqs: tuple[int, ...]) -> None:
        link = node.link
        if link:
            self.network.carry(lambda: node.acknowledged(link, seqs), lambda: node.hang_up(link))

    def command(self, node: Node, command: object) -> list[Reply | None]:
        """Where the reply will be; None in it if the connection broke."""
        box: list[Reply | None] = []
        link, boot = node.link, node.outbox.boot
        self.replies.setdefault(node.name, []).append(box)

        def arrive() -> None:
            if node.is_up and not node.is_cut_off and node.outbox.boot == boot:
                reply = node.answer(command)
                self.network.carry(lambda: node.link == link and box.append(reply), lambda: node.hang_up(link))

        self.network.carry(arrive, lambda: node.hang_up(link))
        return box

    # --- its own work

    def _record(self, event: Event, then: Callable[[bool], None] = lambda _: None) -> None:
        self.queue.append((event, then))

    def _work(self) -> Work:
        yield 0.0
        while True:
            try:
                state = self.journal.refresh()
            except StoreError:
                yield 0.5
                continue
            break
        for node in state.nodes.values():
            if node.status in WATCHED and node.id not in self.records:
                hello = AgentHello(node=node.id, boot=node.boot, address="", num_gpus=node.num_gpus, ranks=())
                suspected = node.status is NodeStatus.SUSPECT
                self.records[node.id] = Record(hello=hello, heard_at=self.kernel.now, suspected=suspected, dialled=False)
        self.remembers = True
        while True:
            yield 0.25
            self._look_around()
            self._write()

    def _write(self) -> None:
        """In order; again and again while the store is down."""
        while self.queue:
            event, then = self.queue[0]
            try:
                is_new = self.journal.append(event)
            except StoreError:
                return
            except IllegalTransition:
                is_new = False
            self.queue.popleft()
            then(is_new)

    def _look_around(self) -> None:
        now, living = self.kernel.now, {name: record for name, record in self.records.items() if not record.lost}
        for name, record in living.items():
            if record.settles_at is not None and now >= record.settles_at:
                record.settles_at = None
                boot = record.hello.boot
                self._record(NodeSettled(id=f"settled/{name}/{boot}", at=self.clock(), node=name, boot=boot))
            if record.link and record.link != self.nodes[name].link and record.ended_at is None:
                record.ended_at, record.joined = now, False
                self._break_replies(name)
        self.sight.look(now, {name: record.contact for name, record in living.items()})
        for name, record in living.items():
            self._judge(name, record, now)

    def _judge(self, name: str, record: Record, now: float) -> None:
        verdict, reason = judge(now, record.contact)
        if verdict is Verdict.LOST:
            verdict, reason = judge(now, record.contact, self.stepping(name))
        if verdict is Verdict.LOST and self.sight.excuses(name):
            verdict = Verdict.SUSPECT
        if (verdict is Verdict.ALIVE) is not record.suspected and verdict is not Verdict.LOST:
            return
        at, boot = self.clock(), record.hello.boot
        told = f"{name}/{boot}/{int(at * 1000)}"
        if verdict is not Verdict.ALIVE and not record.suspected:
            record.suspected = True
            self._record(NodeSuspected(id=f"suspected/{told}", at=at, node=name, boot=boot, reason=reason))
        if verdict is Verdict.ALIVE and record.suspected:
            record.suspected = False
            self._record(NodeCleared(id=f"cleared/{told}", at=at, node=name, boot=boot))
        if verdict is Verdict.LOST:
            record.lost = True
            jobs = tuple(sorted({rank.job for rank in record.hello.ranks}))
            body = NodeUnreachable(silent_s=now - record.heard_at, reason=reason, jobs=jobs)
            self.pending.add(Observation(node=name, boot=boot, seq=-1, at=at, body=body), now=now)


def _fields(hello: AgentHello) -> dict[str, object]:
    return {name: getattr(hello, name) for name in AgentHello.__slots__ if name != "type"}


@dataclass(eq=False)
class Health:
    """Journals what waits at the controller, then acknowledges it; as one of several that do the same."""

    kernel: Kernel
    store: Store
    controller: Controller
    min_age_s: float = 0.0

    def __post_init__(self) -> None:
        self.clock = HostClock(self.kernel)
        self.start()

    def start(self) -> None:
        self.journal = Journal(self.store)
        self.process: Process = self.kernel.start("health", self._work())

    def crash(self) -> None:
        self.kernel.kill(self.process)

    def _work(self) -> Work:
        while True:
            yield 0.3 if self.min_age_s == 0.0 else 1.0
            waiting = self.controller.pending.select(now=self.kernel.now, min_age_s=self.min_age_s)
            for observation in waiting if self.controller.is_up else ():
                try:
                    yield from self._report(observation)
                except StoreError:
                    break

    def _report(self, observation: Observation) -> Work:
        event = self._event_of(observation)
        yield self.kernel.rng.uniform(0.0, 0.02)
        if event:
            self.journal.append(event)
        yield self.kernel.rng.uniform(0.0, 0.02)
        if self.controller.is_up:
            self.controller.acknowledge(observation)

    def _event_of(self, observation: Observation) -> Event | None:
        at, name, body = self.clock(), observation.id, observation.body
        if isinstance(body, RankFinished):
            done = f"finished/{body.job}/{body.generation}"
            it = JobFinished(id=done, at=at, job=body.job, generation=body.generation, iteration=body.iteration)
            return it if body.rank == 0 else None
        if isinstance(body, RankResumed):
            it = {"job": body.job, "generation": body.generation, "iteration": body.iteration, "rank": body.rank}
            return JobResumed(id=name, at=at, **it)
        if isinstance(body, NodeLeaving):
            of = {"node": observation.node, "boot": observation.boot, "reason": body.reason}
            return LeaveAnnounced(id=name, at=at, leaves_at=body.leaves_at, **of)
        failure = classify(observation)
        return FailureDetected(id=failure.id, at=at, failure=failure) if failure else None
