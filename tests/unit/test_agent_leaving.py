"""The agent's side of a node's end: it looks for notices, announces the end once in a life, and waits for its ranks to go."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from unicron_lib.adapters.instance_metadata import Notice
from unicron_lib.agent import leaving as leaving_module
from unicron_lib.agent import spot_watch
from unicron_lib.agent.bell import Bell
from unicron_lib.agent.instance import LINK_LOCAL, notices_from
from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.leaving import ASKED, Leaving
from unicron_lib.agent.messages import NodeNotice
from unicron_lib.agent.ranks import Phase, Rank, Ranks
from unicron_lib.agent.spot_watch import BLIND, BLIND_AFTER, SpotWatch
from unicron_lib.errors import MetadataError, UserError

LONG_S = 60.0


class Node:
    """An agent's parts that matter here, with one rank; `boot` is its life."""

    def __init__(self) -> None:
        self.boot, self.told, self.bell, self.ranks = "b1", [], Bell(), Ranks()
        self.is_open, self.is_quiet = True, True
        self.ranks.add(Rank(job="a", generation=1, rank=0, gpu=0, process=None))
        self.leaving = Leaving(
            ranks=self.ranks, bell=self.bell, life=lambda: self.boot, jobs=lambda: ("a",), tell=self.told.append
        )

    def let_go(self) -> None:
        self.ranks.forget(self.ranks.alive[0])
        self.bell.ring()

    def leave(self, limit_s: float = LONG_S) -> asyncio.Task[None]:
        return asyncio.create_task(self.leaving.until_released(self, limit_s=limit_s))


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(leaving_module, "LOOK_S", 0.001)
    monkeypatch.setattr(spot_watch, "LOOK_S", 0.001)
    return Node()


async def test_who_is_asked_to_leave_says_so_and_waits_for_its_ranks_to_be_let_go(node: Node) -> None:
    task = node.leave()
    await asyncio.sleep(0)
    (told,) = node.told
    assert (told.reason, told.jobs) == (ASKED, ("a",))
    assert time.time() < told.leaves_at <= time.time() + LONG_S
    assert not task.done()
    node.let_go()
    await task


async def test_the_answer_to_the_last_command_is_sent_before_the_end(node: Node) -> None:
    """Else the one who waits for it would have to find out that this node is gone."""
    node.is_quiet = False
    task = node.leave()
    await asyncio.sleep(0)
    node.let_go()
    await asyncio.sleep(0)
    assert not task.done()
    node.is_quiet = True
    node.bell.ring()
    await task


async def test_ranks_that_have_saved_and_ended_are_not_let_go_before_the_plan_says_so(node: Node) -> None:
    """Else its STOP would have to find out that this node is gone, and all its jobs would wait for that."""
    task = node.leave()
    (rank,) = node.ranks.alive
    rank.judged, rank.phase = True, Phase.DRAINED
    rank.process = SimpleNamespace(exit_code=0)
    node.bell.ring()
    await asyncio.sleep(0)
    assert not node.ranks.alive
    assert not task.done()
    node.ranks.forget(rank)
    await task


async def test_a_plan_that_is_not_done_with_ended_ranks_in_time_is_not_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving_module, "STOP_S", 0.01)
    (rank,) = node.ranks.alive
    task = node.leave()
    await asyncio.sleep(0)
    rank.process = SimpleNamespace(exit_code=1)
    await task


async def test_without_a_controller_nothing_is_waited_for(node: Node) -> None:
    node.is_open = False
    await node.leave()


async def test_without_ranks_nothing_is_waited_for_but_that_it_is_told(node: Node) -> None:
    node.let_go()
    await node.leave()
    assert [type(it) for it in node.told] == [NodeLeaving]


async def test_a_controller_that_goes_away_is_not_waited_for_long(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_module, "ALONE_S", 0.01)
    task = node.leave()
    await asyncio.sleep(0)
    node.is_open = False
    await task
    assert node.ranks.alive


async def test_the_time_is_limited(node: Node) -> None:
    await node.leave(limit_s=0.01)
    assert node.ranks.alive


def test_each_life_announces_it_once(node: Node) -> None:
    for boot in ("b1", "b1", "b2"):
        node.boot = boot
        node.leaving.announce("a spot interruption notice says stop", 17.0)
    assert node.told == [NodeLeaving(reason="a spot interruption notice says stop", leaves_at=17.0, jobs=("a",))] * 2


class Service:
    """A metadata service of the test's own; an answer that is an error is raised. The last answer holds."""

    def __init__(self, *answers: object, scheduled: tuple[Notice, ...] = ()) -> None:
        self._answers, self._scheduled = list(answers), scheduled
        self.closed = False

    async def interruption(self) -> Notice | None:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def scheduled(self) -> tuple[Notice, ...]:
        return self._scheduled

    async def close(self) -> None:
        self.closed = True


async def watched(node: Node, service: Service | None, until: Callable[[SpotWatch], bool], *, inject_s: float = 0.0) -> None:
    """Let a watch look until something has been told."""
    watch = SpotWatch(
        endpoint="http://x" if service else None, leaving=node.leaving, life=lambda: node.boot, tell=node.told.append
    )
    running = asyncio.create_task(watch.run())
    async with asyncio.timeout(LONG_S):
        await asyncio.sleep(0)
        if inject_s:
            watch.inject(inject_s)
        while not until(watch):
            assert not running.done(), running.result()
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert service is None or service.closed


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Service], Service]:
    def answer(service: Service) -> Service:
        monkeypatch.setattr("unicron_lib.adapters.instance_metadata.InstanceMetadata", lambda _: service)
        return service

    return answer


async def test_a_notice_is_announced(node: Node, answering: Callable[[Service], Service]) -> None:
    service = answering(Service(None, None, Notice(what="a spot interruption notice says stop", at=17.0)))
    await watched(node, service, lambda _: bool(node.told))
    assert node.told == [NodeLeaving(reason="a spot interruption notice says stop", leaves_at=17.0, jobs=("a",))]


async def test_a_scheduled_end_is_announced_two_minutes_ahead_and_no_earlier(
    node: Node, answering: Callable[[Service], Service]
) -> None:
    far, near = Notice(what="far", at=time.time() + 86400), Notice(what="near", at=time.time() + 100)
    over = Notice(what="the reboot that has begun this", at=psutil.boot_time() - 60)
    await watched(node, answering(Service(None, scheduled=(over, far, near))), lambda _: bool(node.told))
    assert [it.reason for it in node.told] == ["near"]


async def test_a_life_that_begins_while_the_notice_stands_announces_it_too(
    node: Node, answering: Callable[[Service], Service]
) -> None:
    """As after the node was declared lost and has begun anew."""

    def told_twice(_: SpotWatch) -> bool:
        node.boot = "b2" if node.told else "b1"
        return len(node.told) == 2

    await watched(node, answering(Service(Notice(what="it", at=17.0))), told_twice)


async def test_an_injected_notice_needs_no_service(node: Node) -> None:
    await watched(node, None, lambda _: bool(node.told), inject_s=30.0)
    (told,) = node.told
    assert "injected" in told.reason
    assert told.leaves_at == pytest.approx(time.time() + 30.0, abs=LONG_S)


async def test_a_service_that_cannot_be_asked_is_told_of_once_and_when_it_is_back(
    node: Node, answering: Callable[[Service], Service]
) -> None:
    """A watch that sees nothing must not look like one that sees that nothing is wrong."""
    gone = MetadataError("the instance metadata service is out of reach")
    await watched(node, answering(Service(*[gone] * (BLIND_AFTER + 5), None)), lambda _: len(node.told) > 1)
    assert all(isinstance(it, NodeNotice) and it.code == BLIND for it in node.told)
    assert [it.active for it in node.told] == [True, False]
    assert "out of reach" in node.told[0].text


def ec2(root: Path, vendor: str = "Amazon EC2") -> Path:
    (root / "sys/class/dmi/id").mkdir(parents=True)
    (root / "sys/class/dmi/id/sys_vendor").write_text(f"{vendor}\n")
    return root


def test_only_a_machine_that_says_it_is_an_instance_of_ec2_asks(tmp_path: Path) -> None:
    assert notices_from("auto", {}, tmp_path) is None
    assert notices_from("auto", {}, ec2(tmp_path / "other", "QEMU")) is None
    assert notices_from("auto", {}, ec2(tmp_path / "ec2")) == LINK_LOCAL
    (tmp_path / "xen/sys/hypervisor").mkdir(parents=True)
    (tmp_path / "xen/sys/hypervisor/uuid").write_text("ec2e1916-9099-7caf-fd21-012345abcdef\n")
    assert notices_from("auto", {}, tmp_path / "xen") == LINK_LOCAL


def test_the_variables_of_botocore_and_the_operator_are_heeded(tmp_path: Path) -> None:
    root = ec2(tmp_path)
    assert notices_from("auto", {"AWS_EC2_METADATA_DISABLED": "true"}, root) is None
    assert (
        notices_from("auto", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1338/"}, root) == "http://127.0.0.1:1338"
    )
    assert notices_from("off", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1338"}, root) is None
    assert notices_from("http://[fd00:ec2::254]/", {}, tmp_path) == "http://[fd00:ec2::254]"
    with pytest.raises(UserError, match="give auto, off or the address"):
        notices_from("169.254.169.254", {})
