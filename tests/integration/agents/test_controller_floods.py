"""Agents that say too much, too long or nonsense: the controller stays up, judges on time, and loses nothing."""

import asyncio
import logging
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import psutil
import pytest
from local_cluster import LocalCluster, eventually
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from unicron_lib.agent.messages import AgentHello, NodeUnreachable, Observation, from_agent
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import RankFailed
from unicron_lib.agent.uplink import Uplink
from unicron_lib.errors import ControllerError

log = logging.getLogger(__name__)
MEGABYTE = 1 << 20
shares = pytest.mark.asyncio(loop_scope="module")
NONSENSE = {"cut": "{", "bare": '{"type": "heartbeat"}', "long": '"' + "x" * 5000, "bytes": b"\x00\xff"}


@asynccontextmanager
async def stranger(cluster: LocalCluster, node: str) -> AsyncIterator[ClientConnection]:
    """A connection that says a proper hello and then whatever the test has it say."""
    headers = {"Authorization": f"Bearer {cluster.token}"}
    async with connect(cluster.agents_url, additional_headers=headers, proxy=None, compression=None) as link:
        await say(link, AgentHello(node=node, boot="b", address="x", num_gpus=0))
        await cluster.node(node)
        yield link


async def say(link: ClientConnection, message) -> None:
    await link.send(from_agent.dump_json(message).decode())


def failed(node: str, seq: int, text: str = "x") -> Observation:
    body = RankFailed(
        job="a", generation=1, rank=seq, iteration=1, error_type="RuntimeError", message=text, traceback="", parked=False
    )
    return Observation(node=node, boot="b", seq=seq, at=time.time(), body=body)


def memory(process: subprocess.Popen[bytes]) -> int:
    return psutil.Process(process.pid).memory_info().rss


@pytest.mark.parametrize("kinds", [tuple(NONSENSE), *(pytest.param((kind,), marks=pytest.mark.storm) for kind in NONSENSE)])
async def test_nonsense_at_full_speed_delays_no_verdict(cluster: LocalCluster, kinds: tuple[str, ...]) -> None:
    """One agent floods, another one is killed meanwhile and judged on time; the noisy one is alive: it is heard."""
    controller, agent = cluster.processes
    before = memory(controller)
    sent = 0

    async def flood(link: ClientConnection) -> None:
        nonlocal sent
        for kind in cycle(kinds):
            await link.send(NONSENSE[kind])
            await asyncio.sleep(0)  # the client of this test is on the same loop
            sent += 1

    async with stranger(cluster, "noisy") as link:
        flooding = asyncio.create_task(flood(link))
        started_at = time.monotonic()
        agent.kill()
        agent.wait()
        lost = await cluster.observation("node_unreachable")
        took_s, grown = time.monotonic() - started_at, memory(controller) - before
        log.warning("%d frames/s; lost after %.2f s; memory +%d MiB", sent / took_s, took_s, grown >> 20)
        assert sent > 1000, "it was a flood"
        assert lost.node == "n0"
        assert (await cluster.node("noisy")).verdict == "alive"
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    assert grown < 100 * MEGABYTE
    assert cluster.log("controller").count("something unknown") < 40


@shares
async def test_a_frame_beyond_the_limit_ends_its_connection_only(shared_cluster: LocalCluster) -> None:
    async with stranger(shared_cluster, "long") as link:
        with suppress(ConnectionClosed):
            await link.send("x" * (3 * MEGABYTE))
            await link.recv()
        assert link.close_code == 1009
    assert "frame beyond the limit" in (await shared_cluster.node("long", connected=False)).reason
    assert (await shared_cluster.node()).verdict == "alive"


@shares
async def test_huge_failures_at_once_are_all_handled(shared_cluster: LocalCluster) -> None:
    """PB72: 64 failures, each with as much text as an agent passes on."""
    controller, _ = shared_cluster.processes
    before, handled = memory(controller), []
    async with stranger(shared_cluster, "big") as link:
        for seq in range(64):
            await say(link, failed("big", seq, "x" * (64 << 10)))
        while len(handled) < 64:
            waiting = await shared_cluster.client.observations(job="a", wait_s=10)
            assert waiting
            handled += [observation.seq for observation in waiting]
            await shared_cluster.client.acknowledge(observation.id for observation in waiting)
    assert handled == list(range(64))
    assert memory(controller) - before < 200 * MEGABYTE


@shares
async def test_an_agent_that_waits_for_no_answer_is_cut_off(shared_cluster: LocalCluster) -> None:
    """Ten thousand observations that nobody journals: the controller holds a part of them and stays what it is."""
    controller, _ = shared_cluster.processes
    before = memory(controller)
    async with stranger(shared_cluster, "rude") as link:
        with suppress(ConnectionClosed):
            for seq in range(10_000):
                await say(link, failed("rude", seq))
                await asyncio.sleep(0)
            await link.wait_closed()
        await link.wait_closed()
        assert link.close_code == 1008
    assert memory(controller) - before < 50 * MEGABYTE
    assert (await shared_cluster.node()).verdict == "alive"


async def test_a_flood_reaches_the_journal_once_and_in_order_although_the_controller_dies(cluster: LocalCluster) -> None:
    """Ten thousand observations at once; the controller is killed three times while they are being told."""
    outbox = Outbox(node="flood", boot="b")
    for seq in range(10_000):
        outbox.add(replace(failed("flood", 0).body, iteration=seq), at=time.time())
    told: list[int] = []
    async with uplink(cluster, outbox):
        for part in range(1, 4):
            await tell(cluster, told, until=2_000 * part)
            cluster.processes[0].kill()
            cluster.processes[0].wait()
            cluster.processes[0] = await cluster.start_controller()
            cluster.processes.pop()
        await tell(cluster, told, until=10_000)
        await eventually(lambda: emptied(outbox), "the agent has all its answers")
    first = list(dict.fromkeys(told))
    assert first == list(range(10_000))
    log.warning("%d of them were told a second time after a death", len(told) - len(first))


@asynccontextmanager
async def uplink(cluster: LocalCluster, outbox: Outbox) -> AsyncIterator[None]:
    """The agent's own uplink, without an agent around it."""
    facts = SimpleNamespace(node="flood", address="x", num_gpus=0, rack="", pool="", gpu_model="")
    supervisor = SimpleNamespace(facts=facts, ranks=SimpleNamespace(alive=()), kill_all=None, on_news=None)
    link = Uplink(url=cluster.agents_url, token=cluster.token, supervisor=supervisor, outbox=outbox, commands=None)
    talking = asyncio.create_task(link.run())
    try:
        yield
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


async def tell(cluster: LocalCluster, told: list[int], *, until: int) -> None:
    """Do as the health tasks do, as soon as the controller is there: note, then acknowledge."""
    while len(set(told)) < until:
        with suppress(ControllerError):
            waiting = await cluster.client.observations(wait_s=5)
            told += [seen.seq for seen in waiting if not isinstance(seen.body, NodeUnreachable)]
            await cluster.client.acknowledge(observation.id for observation in waiting)


async def emptied(outbox: Outbox) -> bool:
    return len(outbox) == 0
