"""What the controller does at each look, and how much it takes in, with a stopped clock."""

import asyncio
import time
from collections.abc import Iterable, Iterator

import pytest

from unicron_lib.agent.messages import AgentHello, NodeUnreachable, Observation, RankInfo
from unicron_lib.agent.rank_messages import RankFailed, RankFinished
from unicron_lib.controller import observations, watch
from unicron_lib.controller.hub import Link
from unicron_lib.controller.observations import PendingObservations
from unicron_lib.controller.recorder import Recorder
from unicron_lib.controller.service import Controller
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Event, FailureDetected, NodeJoined, NodeSettled
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.journal import fold
from unicron_lib.errors import ControllerError


class MemoryJournal:
    def __init__(self) -> None:
        self.state = ClusterState()
        self.events: dict[str, Event] = {}

    def append(self, event: Event) -> bool:
        if event.id in self.events:
            return False
        self.state, self.events[event.id] = fold(self.state, event), event
        return True

    def refresh(self) -> ClusterState:
        return self.state


class Clock:
    """Monotonic and wall clock of the controller, which move only when they are told to, and not always together."""

    def __init__(self) -> None:
        self.monotonic_s, self.wall_s = 1000.0, 1e9

    def monotonic(self) -> float:
        return self.monotonic_s

    def time(self) -> float:
        return self.wall_s

    def move(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    for module in ("service", "watch"):
        monkeypatch.setattr(f"unicron_lib.controller.{module}.time", clock)
    return clock


@pytest.fixture
async def controller(clock: Clock):
    controller = Controller(Recorder(MemoryJournal()), snooze_s=600.0)
    writing = asyncio.create_task(controller.recorder.run())
    yield controller
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


class Wire:
    """A connection's other end: what was sent, whether it was closed; `broken` makes sending fail."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.closed: int | None = None
        self.broken = False
        self.link = Link(send=self._send, close=self._close)

    async def _send(self, message: object) -> None:
        if self.broken:
            raise ControllerError("the connection to the node broke")
        self.sent.append(message)

    async def _close(self, code: int, _reason: str) -> None:
        self.closed = code


async def join(controller: Controller, boot: str, node: str = "n") -> Wire:
    wire = Wire()
    record = await controller.arrive(AgentHello(node=node, boot=boot, address="x", num_gpus=1), wire.link)
    assert await controller.admit(record, wire.link) is None
    return wire


async def lose(controller: Controller, boot: str, at: float) -> None:
    failure = Failure(
        id=f"n/{boot}/-1", kind=ErrorKind.NODE_LOST, method=DetectionMethod.NODE_HEALTH, seen_at=at, node="n", boot=boot
    )
    assert await controller.recorder.record(FailureDetected(id=failure.id, at=at, failure=failure))


def look(controller: Controller) -> None:
    watch.look_around(controller)


def journalled(controller: Controller, kind: type[Event]) -> list[Event]:
    return [event for event in controller.recorder._journal.events.values() if isinstance(event, kind)]


async def written(controller: Controller) -> None:
    """All that was to be journalled is: the last of it is, and it is written in order."""
    await controller.recorder.record(NodeJoined(id=f"x{time.time_ns()}", at=0.0, node="x", boot="x", address="x", num_gpus=1))


async def watched(controller: Controller, clock: Clock, monkeypatch: pytest.MonkeyPatch, steps: Iterable[float]) -> None:
    """Run the watch; `steps` are the pauses between its looks."""
    pauses = iter(steps)

    async def pause(_: float) -> None:
        step = next(pauses, None)
        if step is None:
            raise asyncio.CancelledError
        clock.move(step)

    monkeypatch.setattr(watch.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await watch.watch(controller)


async def test_a_controller_that_did_not_run_judges_nobody_for_that_time(controller, clock, monkeypatch) -> None:
    """Stopped for a minute, it has heard nobody: neither silent nor closed connections count that minute."""
    await join(controller, "b")
    gone = await join(controller, "b", node="m")
    controller.hub.detach(controller.hub.nodes["m"], gone.link, now=clock.monotonic(), ending="it ended")
    await watched(controller, clock, monkeypatch, (60.0, 0.05))
    assert not any(record.lost for record in controller.hub.nodes.values())
    clock.move(3.0)
    for node in ("o", "p"):  # so that no more than half of the nodes are silent
        await join(controller, "b", node=node)
    look(controller)
    assert {name: controller.hub.nodes[name].lost for name in "nm"} == {"n": False, "m": True}
    clock.move(2.0)
    for node in ("o", "p"):
        await join(controller, "b", node=node)
    look(controller)
    assert controller.hub.nodes["n"].lost


async def test_a_controller_that_is_always_late_still_loses_a_silent_node(controller, clock, monkeypatch) -> None:
    await join(controller, "b")
    await watched(controller, clock, monkeypatch, [watch.DEAF_S + 0.05] * 15)
    assert controller.hub.nodes["n"].lost


async def test_a_controller_that_is_stopped_again_and_again_hears_before_it_judges(controller, clock, monkeypatch) -> None:
    await join(controller, "b")
    record = controller.hub.nodes["n"]

    def stops() -> Iterator[float]:
        for _ in range(20):
            yield 10.0
            record.heard_at = clock.monotonic()  # what lay in its socket is read after the look
            yield 0.05

    await watched(controller, clock, monkeypatch, stops())
    assert not record.lost


async def test_a_blind_controller_loses_nobody_and_tells_a_person(controller, clock) -> None:
    wires = {node: await join(controller, "b", node=node) for node in ("n", "m", "o")}
    for node in ("n", "m"):
        controller.hub.detach(controller.hub.nodes[node], wires[node].link, now=clock.monotonic(), ending="it was reset")
    for _ in range(50 * 20):
        clock.move(0.05)
        controller.hub.nodes["o"].heard_at = clock.monotonic()
        look(controller)
    views = {node: watch.view(controller, record) for node, record in controller.hub.nodes.items()}
    assert {node: view.verdict for node, view in views.items()} == {"n": "suspect", "m": "suspect", "o": "alive"}
    assert "2 of 3 nodes fell silent" in views["n"].reason
    for node in ("n", "m"):
        await join(controller, "b", node=node)
    look(controller)
    assert [watch.view(controller, record).verdict for record in controller.hub.nodes.values()] == ["alive"] * 3
    told = [(o.node, o.boot, o.body.code, o.body.active) for o in controller.pending.select(now=1e9)]
    assert told == [("m", "b", "controller_blind", True), ("m", "b", "controller_blind", False)]


@pytest.mark.parametrize(("reporter", "is_lost"), [("n", True), ("m", False)])
async def test_a_node_that_has_gone_and_whose_ranks_are_missed_elsewhere_is_lost_sooner(controller, clock, reporter, is_lost):
    wires = {node: await join(controller, "b", node=node) for node in ("n", "m", "o", "p")}
    gone = controller.hub.nodes["m"]
    gone.ranks = (RankInfo(job="gpt-a", generation=2, rank=1, gpu=0, pid=1),)
    message = "Connection closed by peer"
    body = RankFailed(
        job="gpt-a", generation=2, rank=0, iteration=7, error_type="RuntimeError", message=message, traceback="", parked=True
    )
    told = Observation(node=reporter, boot="b", seq=1, at=1.0, body=body)
    await controller.hear(controller.hub.nodes[reporter], wires[reporter].link, told)
    controller.hub.detach(gone, wires["m"].link, now=clock.monotonic(), ending="it was reset")
    clock.move(1.5)
    look(controller)
    assert gone.lost is is_lost
    clock.move(1.5)
    for node in ("n", "o", "p"):
        controller.hub.nodes[node].heard_at = clock.monotonic()
    look(controller)
    assert gone.lost


async def test_a_wall_clock_that_jumps_changes_no_verdict(controller, clock) -> None:
    await join(controller, "b")
    for jump in (3600.0, -7200.0):
        clock.wall_s += jump
        look(controller)
        assert watch.view(controller, controller.hub.nodes["n"]).verdict == "alive"
    clock.move(5.0)
    look(controller)
    assert controller.hub.nodes["n"].lost


async def test_a_node_that_comes_and_goes_settles_after_its_snooze(controller, clock) -> None:
    for life in range(2):
        await join(controller, f"b{life}")
        await lose(controller, f"b{life}", at=clock.time())
        clock.move(60.0)
    await join(controller, "b2")
    arrived = journalled(controller, NodeJoined)[-1]
    assert arrived.snoozed_until == clock.time() + 600.0
    record = controller.hub.nodes["n"]
    assert watch.view(controller, record).snoozed_until == pytest.approx(arrived.snoozed_until)
    clock.wall_s -= 86_400.0  # the snooze is a duration: a clock that is set back does not prolong it
    for _ in range(599):
        clock.move(1.0)
        record.heard_at = clock.monotonic()
        look(controller)
    await written(controller)
    assert journalled(controller, NodeSettled) == []
    clock.move(1.0)
    look(controller)
    look(controller)
    await written(controller)
    (settled,) = journalled(controller, NodeSettled)
    assert (settled.node, settled.boot) == ("n", "b2")
    assert watch.view(controller, record).snoozed_until == 0.0


async def test_a_snooze_outlives_the_controller_and_is_over_only_for_a_node_that_is_there(controller, clock) -> None:
    for life in range(3):
        await join(controller, f"b{life}")
        if life < 2:
            await lose(controller, f"b{life}", at=clock.time())
    again = Controller(controller.recorder, snooze_s=600.0)
    again.remember(controller.recorder._journal.state)
    assert set(again.hub.nodes) == {"n"}
    clock.move(400.0)
    record = again.hub.nodes["n"]
    record.heard_at = clock.monotonic()
    wire = await join(again, "b2")
    assert record.settles_at == clock.monotonic() + 200.0
    again.hub.detach(record, wire.link, now=clock.monotonic() + 200.0, ending="it ended")
    clock.move(200.0)
    look(again)
    await written(again)
    assert journalled(again, NodeSettled) == []


async def test_snoozing_can_be_switched_off(controller, clock) -> None:
    eager = Controller(controller.recorder, snooze_s=0.0)
    for life in range(4):
        await join(eager, f"b{life}")
        await lose(eager, f"b{life}", at=clock.time())
    assert {event.snoozed_until for event in journalled(eager, NodeJoined)} == {0.0}


def seen(seq: int, node: str = "n", job: str = "a") -> Observation:
    body = RankFinished(job=job, generation=1, rank=0, iteration=1, loss=1.0)
    return Observation(node=node, boot="b", seq=seq, at=0.0, body=body)


async def test_more_than_a_controller_takes_ends_the_connection_and_is_told_again(controller, monkeypatch) -> None:
    monkeypatch.setattr(observations, "MOST_WAITING", 3)
    wire = await join(controller, "b")
    record = controller.hub.nodes["n"]
    heard = [await controller.hear(record, wire.link, seen(seq)) for seq in range(4)]
    assert heard == [True, True, True, False]
    assert wire.closed == 1008
    assert len(controller.pending.select(now=1e9)) == 3
    assert await controller.acknowledge([seen(seq).id for seq in range(3)]) == 3
    again = await join(controller, "b")
    assert await controller.hear(record, again.link, seen(3))
    assert [o.seq for o in controller.pending.select(now=1e9)] == [3]


async def test_a_broken_connection_keeps_no_other_agent_from_its_answer(controller) -> None:
    broken, whole = await join(controller, "b"), await join(controller, "b", node="m")
    for wire, node in ((broken, "n"), (whole, "m")):
        await controller.hear(controller.hub.nodes[node], wire.link, seen(0, node))
    broken.broken = True
    assert await controller.acknowledge([seen(0, "n").id, seen(0, "m").id]) == 2
    assert [ack.seqs for ack in whole.sent] == [(0,)]


async def test_nobody_speaks_for_another_life(controller) -> None:
    wire = await join(controller, "b")
    assert await controller.hear(controller.hub.nodes["n"], wire.link, seen(0, "m"))
    assert controller.pending.select(now=1e9) == ()


def test_agents_are_listened_to_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of one node delays neither another node's word nor the news that the node itself is lost."""
    monkeypatch.setattr(observations, "MOST_AT_ONCE", 5)
    pending = PendingObservations()
    for seq in range(100):
        pending.add(seen(seq), now=0.0)
    pending.add(seen(0, "m"), now=0.0)
    lost = Observation(node="n", boot="b", seq=-1, at=0.0, body=NodeUnreachable(silent_s=5.0, reason="r"))
    pending.add(lost, now=0.0)
    first = pending.select(now=0.0)
    assert {o.id for o in first} == {"n/b/0", "n/b/1", "n/b/2", "m/b/0", "n/b/-1"}
    pending.acknowledge(o.id for o in first)
    assert [o.seq for o in pending.select(now=0.0)] == [3, 4, 5, 6, 7]
