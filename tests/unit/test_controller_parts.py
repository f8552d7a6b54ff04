"""The pure parts of the controller, with explicit times."""

import asyncio
import math
from dataclasses import replace

import pytest

from unicron_lib.agent.messages import AgentHello, GpuFault, NodeUnreachable, Observation, RankInfo, Reply, StopRanks
from unicron_lib.agent.rank_messages import Progress, RankFinished
from unicron_lib.controller.hub import Hub, Link
from unicron_lib.controller.liveness import Stepping
from unicron_lib.controller.observations import PendingObservations
from unicron_lib.controller.progress import ProgressTable
from unicron_lib.controller.recorder import Recorder
from unicron_lib.controller.service import Controller
from unicron_lib.controller.views import all_progress_json
from unicron_lib.controller.watch import look_at
from unicron_lib.domain.cluster import ClusterState, Node, NodeStatus
from unicron_lib.domain.events import Event, NodeCleared, NodeJoined
from unicron_lib.domain.jobs import JobSpec, JobState, JobStatus
from unicron_lib.domain.plans import Assignment, Layout, Slot
from unicron_lib.errors import CommandTimeout, ControllerError, IllegalTransition, NodeNotConnected, StoreError


def observation(seq: int, job: str = "a", boot: str = "b") -> Observation:
    body = RankFinished(job=job, generation=1, rank=0, iteration=1, loss=1.0)
    return Observation(node="n", boot=boot, seq=seq, at=0.0, body=body)


def test_observations_wait_until_they_are_acknowledged() -> None:
    pending = PendingObservations()
    assert pending.add(observation(0), now=1.0)
    assert pending.add(observation(0), now=5.0), "told again after a reconnection"
    assert pending.add(observation(1, job="b"), now=2.0)
    assert [o.seq for o in pending.select(now=2.0)] == [0, 1]
    assert [o.seq for o in pending.select(now=2.0, job="b")] == [1]
    assert [o.seq for o in pending.select(now=3.0, min_age_s=2.0)] == [0]
    assert pending.next_due_s(now=3.0, min_age_s=2.0) == 1.0
    assert pending.acknowledge(["n/b/0", "n/b/0", "unknown"]) == (observation(0),)
    assert not pending.add(observation(0), now=9.0), "acknowledge it again at once"
    assert [o.seq for o in pending.select(now=9.0)] == [1]


@pytest.mark.parametrize(
    "body",
    [
        NodeUnreachable(silent_s=5.0, reason="r", jobs=("a", "b")),
        GpuFault(kind="gpu_lost", gpu=0, uuid="u", evidence="e", jobs=("a", "b")),
    ],
    ids=lambda body: body.type,
)
def test_what_befell_a_node_concerns_the_jobs_that_it_ran(body: NodeUnreachable | GpuFault) -> None:
    pending = PendingObservations()
    seen = Observation(node="n", boot="x", seq=-1, at=0.0, body=body)
    assert seen.job is None
    pending.add(seen, now=0.0)
    assert [len(pending.select(now=0.0, job=job)) for job in ("a", "b", "c")] == [1, 1, 0]


def report(rank: int, iteration: int, *, generation: int = 1, loss: float = 1.0, **more: float) -> Progress:
    return Progress(
        job="a",
        generation=generation,
        rank=rank,
        iteration=iteration,
        loss=loss,
        iteration_s=0.1,
        world_size=2,
        at=100.0 + iteration,
        **{"flops": 1.0, "compute_s": 0.1, **more},
    )


def test_progress_is_the_newest_of_the_newest_generation() -> None:
    table = ProgressTable()
    assert table.view("a") is None
    assert table.add(report(0, 5, flops=3.0), node="n0", now=1.0)
    assert not table.add(report(0, 5), node="n0", now=2.0), "a heartbeat repeats it"
    assert table.add(report(1, 6, loss=2.0), node="n1", now=2.0)
    view = table.view("a")
    assert view is not None
    assert (view.iteration, view.loss, view.first_iteration_at, view.iterations) == (6, 2.0, 105.0, {0: 5, 1: 6})
    assert view.has_stepped(1, 2)
    assert not view.has_stepped(2, 2)
    assert table.add(report(0, 3, generation=2), node="n0", now=3.0), "a restart goes back to a checkpoint"
    assert not table.add(report(1, 7), node="n1", now=3.0), "a replaced generation is not listened to"
    view = table.view("a")
    assert view is not None
    assert (view.generation, view.iteration, view.measured_flops) == (2, 3, {2: 1.0})
    assert not view.has_stepped(2, 2)
    assert not view.has_stepped(2)


def test_a_loss_of_nan_travels_as_nan() -> None:
    table = ProgressTable()
    table.add(report(0, 5, loss=math.nan), node="n0", now=1.0)
    (view,) = all_progress_json.validate_json(all_progress_json.dump_json(table.views()))
    assert math.isnan(view.loss)


def test_only_other_nodes_of_the_same_generation_are_evidence() -> None:
    table = ProgressTable()
    ranks = (RankInfo(job="a", generation=1, rank=0, pid=1, gpu=0),)
    table.add(report(0, 5), node="n0", now=1.0)
    assert table.stepping("n0", ranks) is None
    table.add(report(1, 3, compute_s=0.0), node="n1", now=1.5)
    assert table.stepping("n0", ranks) is None, "PB19: without an all-reduce it needs nobody"
    table.add(report(1, 4), node="n1", now=2.0)
    assert table.stepping("n0", ranks) == Stepping(job="a", iteration=4, reporter="n1", at=2.0)
    assert table.stepping("n2", ()) is None
    table.add(report(1, 5, generation=2), node="n1", now=3.0)
    assert table.stepping("n0", ranks) is None, "the new generation may do without this node"


class FlakyJournal:
    def __init__(self, failures: int = 0, state: ClusterState | None = None) -> None:
        self.failures = failures
        self.events: list[Event] = []
        self.state = state or ClusterState()

    def append(self, event: Event) -> bool:
        if self.failures:
            self.failures -= 1
            raise StoreError("the store is down")
        if event.id == "illegal":
            raise IllegalTransition("that cannot be")
        if event in self.events:
            return False
        self.events.append(event)
        return True

    def refresh(self) -> ClusterState:
        return self.state


def joined(name: str) -> NodeJoined:
    return NodeJoined(id=name, at=0.0, node="n", boot="b", address="x", num_gpus=1)


async def test_the_recorder_keeps_the_order_through_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_lib.controller.recorder.BACK_OFF_S", (0.001, 0.001))
    journal = FlakyJournal(failures=3)
    recorder = Recorder(journal)
    writing = asyncio.create_task(recorder.run())
    results = await asyncio.gather(*(recorder.record(joined(name)) for name in ("1", "illegal", "2", "1")))
    assert results == [True, False, True, False]
    assert [event.id for event in journal.events] == ["1", "2"]
    assert journal.failures == 0
    assert recorder.error == ""
    writing.cancel()


HELLO = AgentHello(node="n", boot="b", address="x", num_gpus=1)


def link(sent: asyncio.Queue[object] | None = None) -> Link:
    async def send(message: object) -> None:
        if sent is not None:
            sent.put_nowait(message)

    async def close(_code: int, _reason: str) -> None:
        pass

    return Link(send=send, close=close)


async def test_a_name_goes_to_a_newer_life_only_when_the_older_is_silent() -> None:
    hub, new = Hub(), replace(HELLO, boot="c")
    assert hub.refusal(HELLO, now=0.0) is None
    first = link()
    record = await hub.attach(HELLO, first, now=0.0)
    assert hub.refusal(new, now=1.0) is not None
    assert hub.refusal(HELLO, now=1.0) is None, "the same life may dial again"
    assert hub.refusal(new, now=3.0) is None
    hub.detach(record, first, now=1.0, ending="it ended")
    assert hub.refusal(new, now=1.0) is None


async def test_a_command_waits_for_its_reply_and_for_the_journal() -> None:
    hub, sent = Hub(), asyncio.Queue[object]()
    with pytest.raises(NodeNotConnected, match="unknown"):
        await hub.command("n", STOP, timeout_s=1)
    line = link(sent)
    record = await hub.attach(HELLO, line, now=0.0)
    with pytest.raises(CommandTimeout):
        await hub.command("n", STOP, timeout_s=0.01)
    assert sent.empty(), "its arrival is not journalled yet"
    line.joined.set()
    both = [asyncio.create_task(hub.command("n", STOP, timeout_s=10)) for _ in range(2)]
    assert [await sent.get(), await sent.get()] == [STOP, STOP]
    hub.answered(line, Reply(step="s", ok=True))
    assert [reply.ok for reply in await asyncio.gather(*both)] == [True, True]
    broken = asyncio.create_task(hub.command("n", STOP, timeout_s=10))
    assert await sent.get() == STOP
    hub.detach(record, line, now=1.0, ending="it ended")
    with pytest.raises(ControllerError, match="send the command again"):
        await broken


STOP = StopRanks(step="s", job="a", below_generation=1, grace_s=1)


async def test_nodes_of_the_journal_are_watched_from_the_start() -> None:
    nodes = {
        name: Node(id=name, boot="b", address="x", num_gpus=1, status=status)
        for name, status in (
            ("r", NodeStatus.READY),
            ("s", NodeStatus.SUSPECT),
            ("l", NodeStatus.LOST),
            ("q", NodeStatus.QUARANTINED),
            ("x", NodeStatus.LEAVING),
        )
    }
    assignment = Assignment(job="a", generation=3, layout=Layout(), slots=(Slot("r", 0),))
    jobs = {"a": JobState(spec=JobSpec(job="a"), status=JobStatus.RUNNING, generation=3, assignment=assignment)}
    controller = Controller(Recorder(FlakyJournal()))
    controller.remember(ClusterState(nodes=nodes, jobs=jobs))
    assert set(controller.hub.nodes) == {"r", "s", "q", "x"}, "a quarantined one can get lost, too"
    assert controller.hub.nodes["s"].suspected
    assert controller.hub.nodes["r"].ranks == (RankInfo(job="a", generation=3, rank=0, pid=0, gpu=0),)
    assert not controller.hub.nodes["r"].contact.dialled


async def test_a_suspicion_that_a_dying_controller_journalled_is_cleared_by_the_next() -> None:
    suspect = Node(id="n", boot="b", address="x", num_gpus=1, status=NodeStatus.SUSPECT)
    journal = FlakyJournal(state=ClusterState(nodes={"n": suspect}))
    controller = Controller(Recorder(journal))
    writing = asyncio.create_task(controller.recorder.run())
    line = link()
    record = await controller.arrive(HELLO, line)
    assert await controller.admit(record, line) is None
    look_at(controller, record)
    await controller.recorder.record(joined("the last in the queue"))
    assert [type(event) for event in journal.events] == [NodeJoined, NodeCleared, NodeJoined]
    writing.cancel()


async def test_a_life_that_the_journal_calls_lost_is_not_admitted() -> None:
    lost = Node(id="n", boot="b", address="x", num_gpus=1, status=NodeStatus.LOST)
    journal = FlakyJournal(state=ClusterState(nodes={"n": lost}))
    controller = Controller(Recorder(journal))
    writing = asyncio.create_task(controller.recorder.run())
    line = link()
    assert await controller.admit(await controller.arrive(HELLO, line), line) is None
    assert line.joined.is_set()
    again = link()
    journal.append = lambda _: False  # type: ignore[method-assign]  # as when that arrival is in the journal
    refusal = await controller.admit(await controller.arrive(HELLO, again), again)
    assert refusal is not None
    assert "declared lost" in refusal
    assert not again.joined.is_set()
    writing.cancel()
