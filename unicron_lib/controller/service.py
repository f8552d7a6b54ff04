"""What the controller does with what agents say: the shell around its pure parts."""

import logging
import time
from collections.abc import Iterable

from unicron_lib.agent.bell import Bell
from unicron_lib.agent.messages import (
    AgentHello,
    FromAgent,
    Heartbeat,
    NodeNotice,
    NodeUnreachable,
    Observation,
    RankInfo,
    Reply,
)
from unicron_lib.agent.rank_messages import Progress
from unicron_lib.agent.uplink import DECLARED_LOST, TOO_MUCH
from unicron_lib.controller.complaints import Complaints
from unicron_lib.controller.hub import Hub, Link, NodeRecord
from unicron_lib.controller.observations import PendingObservations
from unicron_lib.controller.progress import ProgressTable
from unicron_lib.controller.recorder import Recorder
from unicron_lib.controller.sight import BLIND_S, Sight
from unicron_lib.domain.cluster import ClusterState, Node, NodeStatus
from unicron_lib.domain.events import NodeJoined
from unicron_lib.domain.flapping import snooze_until

log = logging.getLogger(__name__)
SNOOZE_S = 600.0
WATCHED = frozenset({NodeStatus.READY, NodeStatus.SUSPECT, NodeStatus.SNOOZED, NodeStatus.LEAVING, NodeStatus.QUARANTINED})


class Controller:
    """The controller's memory, which it can lose at any time: the journal and the agents fill it again.

    `bell` rings at every observation and every progress; `watched_at` tells when somebody last asked for the
    observations of a job, by the monotonic clock. `num_acknowledged` observations have been journalled in this life.
    """

    def __init__(self, recorder: Recorder, *, snooze_s: float = SNOOZE_S, blind_s: float = BLIND_S) -> None:
        """`snooze_s` is how long a node that comes and goes has to stay before it gets ranks again; 0: it need not.

        Most nodes at once are not judged before they were silent for `blind_s`; 0: they are judged like any other.
        """
        self.recorder = recorder
        self._snooze_s = snooze_s
        self.hub = Hub()
        self.sight = Sight(blind_s=blind_s)
        self.pending = PendingObservations()
        self.progress = ProgressTable()
        self.complaints = Complaints()
        self.bell = Bell()
        self.watched_at: dict[str, float] = {}
        self.num_acknowledged = 0

    def remember(self, state: ClusterState) -> None:
        """Take over the nodes that the journal knows: those that do not dial in are going to be judged."""
        for node in state.nodes.values():
            if node.status in WATCHED and node.id not in self.hub.nodes:
                hello = AgentHello(node=node.id, boot=node.boot, address=node.address, num_gpus=node.num_gpus)
                self.hub.nodes[node.id] = NodeRecord(
                    hello=hello,
                    heard_at=time.monotonic(),
                    ranks=tuple(_assigned(state, node)),
                    suspected=node.status is NodeStatus.SUSPECT,
                )

    async def arrive(self, hello: AgentHello, link: Link) -> NodeRecord:
        """An agent said hello."""
        return await self.hub.attach(hello, link, now=time.monotonic())

    async def admit(self, record: NodeRecord, link: Link) -> str | None:
        """Journal the arrival, then let commands through; why not, if this life of the node was declared lost."""
        hello, now = record.hello, time.time()
        known = (await self.recorder.state()).nodes.get(hello.node)
        event = NodeJoined(
            id=f"joined/{hello.node}/{hello.boot}",
            at=now,
            node=hello.node,
            boot=hello.boot,
            address=hello.address,
            num_gpus=hello.num_gpus,
            rack=hello.rack,
            pool=hello.pool,
            gpu_model=hello.gpu_model,
            snoozed_until=snooze_until(known, now, snooze_s=self._snooze_s),
        )
        is_new = await self.recorder.record(event)
        node = (await self.recorder.state()).nodes.get(hello.node)
        mine = node if node is not None and node.boot == hello.boot else None
        lost = record.lost or self.pending.knows(unreachable_id(hello.node, hello.boot))
        if lost or (not is_new and mine is not None and mine.status is NodeStatus.LOST):
            return f"node {hello.node} was silent for too long and was declared lost"
        if mine is not None and mine.status is NodeStatus.SUSPECT:
            record.suspected = True  # a controller that has died since suspected it: this one clears it
        if mine is not None and mine.status is NodeStatus.SNOOZED:
            snooze_s = min(mine.snoozed_until - now, self._snooze_s)  # a clock that was set back must not hold it for long
            record.settles_at = time.monotonic() + snooze_s
            log.info("node %s comes and goes: it gets no ranks for %.0f s", hello.node, snooze_s)
        link.joined.set()
        return None

    async def hear(self, record: NodeRecord, link: Link, message: FromAgent) -> bool:
        """Take in what an agent says; False if its connection had to be closed for it."""
        if record.lost:
            await link.close(DECLARED_LOST, "silent for too long")
            return False
        match message:
            case Heartbeat():
                record.ranks = message.ranks
                self._note_progress(record, message.progress)
            case Progress():
                self._note_progress(record, [message])
            case Observation():
                return await self._take_in(record, link, message)
            case Reply():
                self.hub.answered(link, message)
            case AgentHello():
                log.warning("node %s said hello twice", record.hello.node)
        return True

    async def _take_in(self, record: NodeRecord, link: Link, observation: Observation) -> bool:
        node, boot = record.hello.node, record.hello.boot
        if (observation.node, observation.boot) != (node, boot):
            log.warning("node %s told an observation of %s, another life or node", node, observation.id)
            return True
        if not self.pending.has_room(node, boot):
            await link.close(TOO_MUCH, "too many observations without an answer: send them again, fewer at once")
            return False
        if not self.pending.knows(observation.id):  # what is sent again is no news
            self.complaints.hear(observation, now=time.monotonic())
        if not self.pending.add(observation, now=time.monotonic()):
            await self.hub.acknowledge(node, boot, (observation.seq,))
        self.bell.ring()
        return True

    async def acknowledge(self, ids: Iterable[str]) -> int:
        """Observations are journalled: let the agents forget them; how many of them were waiting."""
        done = self.pending.acknowledge(ids)
        self.num_acknowledged += len(done)
        self.bell.ring()
        lives: dict[tuple[str, str], list[int]] = {}
        for observation in done:
            if observation.seq >= 0:
                lives.setdefault((observation.node, observation.boot), []).append(observation.seq)
        for (node, boot), seqs in lives.items():
            await self.hub.acknowledge(node, boot, tuple(seqs))
        return len(done)

    def declare_lost(self, record: NodeRecord, *, silent_s: float, reason: str) -> None:
        """The node is judged lost: an observation for the health tasks, which journal the failure."""
        record.lost = True
        jobs = tuple(sorted({rank.job for rank in record.ranks}))
        body = NodeUnreachable(silent_s=silent_s, reason=f"node {record.hello.node}: {reason}", jobs=jobs)
        observation = Observation(node=record.hello.node, boot=record.hello.boot, seq=-1, at=time.time(), body=body)
        self.pending.add(observation, now=time.monotonic())
        self.bell.ring()

    def notice(self, record: NodeRecord, notice: NodeNotice) -> None:
        """The controller itself has something to tell people, beside what this life of a node tells."""
        at = time.time()
        # Unique among the notices of this life of the node, also after a restart of the controller.
        seq = -int(at * 1000)
        self.pending.add(
            Observation(node=record.hello.node, boot=record.hello.boot, seq=seq, at=at, body=notice), now=time.monotonic()
        )
        self.bell.ring()

    def _note_progress(self, record: NodeRecord, reports: Iterable[Progress]) -> None:
        now = time.monotonic()
        for report in reports:
            if self.progress.add(report, node=record.hello.node, now=now):
                self.bell.ring()


def unreachable_id(node: str, boot: str) -> str:
    """The id of the observation that a life of a node is lost."""
    return f"{node}/{boot}/-1"


def _assigned(state: ClusterState, node: Node) -> Iterable[RankInfo]:
    """The ranks that should be running on a node, as far as the journal knows."""
    for job in state.jobs.values():
        if job.assignment is None or not job.wants_gpus:
            continue
        for rank, gpu in job.assignment.ranks_on(node.id):
            yield RankInfo(job=job.spec.job, generation=job.assignment.generation, rank=rank, pid=0, gpu=gpu)
