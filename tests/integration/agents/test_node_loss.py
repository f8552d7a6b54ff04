"""A node that is gone, in each of the ways in which one goes, is seen by our own heartbeats, and told apart."""

import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import pytest_asyncio
from local_cluster import LocalCluster, eventually
from proxy import Proxy

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import NodeUnreachable, Observation

log = logging.getLogger(__name__)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Way:
    """How to be gone: what is done, what it is called, and whether the agent lives on."""

    strike: Callable[["Node"], object]
    words: str
    survives: bool


@dataclass
class Node:
    name: str
    cluster: LocalCluster
    proxy: Proxy
    agent: object

    async def lost(self) -> Observation:
        async def ask() -> Observation | None:
            waiting = await self.cluster.client.observations(wait_s=1.0)
            return next((o for o in waiting if o.node == self.name and isinstance(o.body, NodeUnreachable)), None)

        return await eventually(ask, f"the loss of {self.name}")


WAYS = {
    "killed": Way(lambda node: node.agent.kill(), "its connection ended without a goodbye", survives=False),
    "stopped": Way(lambda node: node.agent.send_signal(signal.SIGINT), "its agent stopped and said goodbye", survives=False),
    "frozen": Way(lambda node: node.agent.send_signal(signal.SIGSTOP), "its connection is open, but", survives=True),
    "swallowed": Way(lambda node: node.proxy.swallow(), "its connection is open, but", survives=True),
    "reset": Way(lambda node: node.proxy.reset(), "its connection was reset", survives=True),
    "half-closed": Way(lambda node: node.proxy.half_close(), "its connection ended without a goodbye", survives=True),
}


@pytest_asyncio.fixture(loop_scope="module")
async def node(shared_cluster: LocalCluster, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """A node of its own behind a proxy, with one rank, which has no peer anywhere."""
    name = re.sub("[^a-z]", "", request.node.name)[-30:]
    proxy = Proxy(shared_cluster.port)
    agent = shared_cluster.start_agent(name, "--controller", await proxy.start())
    await shared_cluster.node(name)
    job = f"job-{name}"
    await shared_cluster.launch(node=name, ranks=1, job=job, step=f"launch-{name}")
    assert await shared_cluster.client.job_progress(job, generation=1, world_size=1, wait_s=10)
    await eventually(lambda: nobody_is_judged(shared_cluster), "only this node is going to fall silent")
    yield Node(name=name, cluster=shared_cluster, proxy=proxy, agent=agent)
    agent.send_signal(signal.SIGCONT)
    agent.kill()
    agent.wait()
    await proxy.close()


async def nobody_is_judged(cluster: LocalCluster) -> bool:
    return not any(seen.verdict == "suspect" for seen in await cluster.client.nodes())


@pytest.mark.parametrize("way", WAYS)
async def test_a_node_that_is_gone_is_lost(node: Node, way: str) -> None:
    """PB18, PB19, PB58: whichever node it is, although no rank and no collective complains."""
    how = WAYS[way]
    struck_at = time.monotonic()
    how.strike(node)
    lost = await node.lost()
    log.warning("%s: lost after %.2f s: %s", way, time.monotonic() - struck_at, lost.body.reason)
    assert how.words in lost.body.reason
    assert lost.body.jobs == (() if way == "stopped" else (f"job-{node.name}",)), "an agent that stops ends its ranks"
    await node.cluster.client.acknowledge([lost.id])
    if how.survives:
        node.agent.send_signal(signal.SIGCONT)
        node.proxy.mend()
        again = await eventually(lambda: other_life(node, lost.boot), "a new life")
        assert again != lost.boot
    others = {seen.node: seen.verdict for seen in await node.cluster.client.nodes() if seen.node == "n0"}
    assert others == {"n0": "alive"}


async def other_life(node: Node, boot: str) -> str | None:
    seen = await node.cluster.node(node.name)
    return seen.boot if seen.boot != boot and seen.verdict == "alive" and not seen.ranks else None


async def test_a_connection_that_breaks_and_comes_back_loses_nothing(node: Node) -> None:
    """Five times in a row: the outages do not add up."""
    before = await node.cluster.node(node.name)
    for number in range(5):
        node.proxy.cut()
        await eventually(lambda number=number: dialled(node, 2 + number), "it dials again")
        after = await node.cluster.node(node.name, verdict="alive")
    assert after.boot == before.boot
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    assert await node.cluster.client.observations(job=f"job-{node.name}") == ()


async def dialled(node: Node, times: int) -> bool:
    return node.proxy.num_connections >= times


async def test_a_short_partition_is_a_suspicion(node: Node) -> None:
    before = await node.cluster.node(node.name)
    await partition(node, 4.0)
    await node.cluster.node(node.name, verdict="suspect")
    after = await node.cluster.node(node.name, verdict="alive")
    assert after.boot == before.boot
    assert node.proxy.num_connections == 1, "the connection was half-open all the time"
    assert await node.cluster.client.observations(job=f"job-{node.name}") == ()


async def test_a_long_partition_is_a_loss_and_the_node_comes_back_anew(node: Node) -> None:
    await partition(node, 6.0)
    lost = await node.lost()
    assert "its connection is open" in lost.body.reason
    await node.cluster.client.acknowledge([lost.id])
    assert await eventually(lambda: other_life(node, lost.boot), "a new life")
    assert node.proxy.num_connections == 2


async def partition(node: Node, seconds: float) -> None:
    command = InjectFault(step=f"partition-{node.name}", fault="partition", amount=seconds)
    assert (await node.cluster.client.command(node.name, command)).ok


async def test_dialling_that_fails_is_told_once_a_cause(node: Node) -> None:
    node.proxy.reset()
    await eventually(lambda: refused(node, 4), "it dials and dials")
    node.proxy.mend()
    await node.cluster.node(node.name, verdict="alive")
    told = [line for line in node.cluster.log(node.name).splitlines() if "dialling until" in line]
    causes = [line.partition("WARNING")[2] for line in told]
    assert causes, "it is told"
    assert all(cause != following for cause, following in pairwise(causes)), told


async def refused(node: Node, times: int) -> bool:
    return node.proxy.refused >= times
