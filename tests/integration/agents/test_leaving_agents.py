"""A real agent whose node is going to leave: told by the metadata service, or by SIGTERM."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from local_cluster import LocalCluster, eventually

from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.leaving import ASKED
from unicron_lib.agent.messages import Observation, StopRanks

sys.path.insert(0, str(Path(__file__).parents[2] / "contracts"))

from metadata_service import MetadataService

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def metadata() -> Iterator[MetadataService]:
    service = MetadataService()
    yield service
    service.close()


async def leaving(cluster: LocalCluster, node: str) -> Observation:
    async def ask() -> Observation | None:
        waiting = await cluster.client.observations(wait_s=1.0)
        return next((it for it in waiting if it.node == node and isinstance(it.body, NodeLeaving)), None)

    return await eventually(ask, f"{node} says that it leaves")


async def asked_to_stop(cluster: LocalCluster, node: str, *, job: str) -> tuple[subprocess.Popen[bytes], Observation]:
    """A new node with a rank of the job, after SIGTERM: its agent, and what that has told."""
    agent = cluster.start_agent(node)
    await cluster.node(node)
    await cluster.launch(node=node, ranks=1, job=job, step=f"launch-{job}")
    agent.terminate()
    return agent, await leaving(cluster, node)


async def test_sigterm_is_answered_when_a_plan_has_let_the_ranks_go(shared_cluster: LocalCluster) -> None:
    cluster = shared_cluster
    agent, told = await asked_to_stop(cluster, "leaving-1", job="sent-off")
    assert (told.body.reason, told.body.jobs) == (ASKED, ("sent-off",))
    assert agent.poll() is None, "its rank is not let go yet"
    reply = await cluster.client.command("leaving-1", StopRanks(step="s", job="sent-off", below_generation=2, grace_s=1.0))
    assert reply.result == {"stopped": 1}, "the answer comes before the end"
    assert agent.wait(20) == 0
    await cluster.client.acknowledge([told.id])


async def test_the_second_sigterm_ends_the_agent_at_once(shared_cluster: LocalCluster) -> None:
    cluster = shared_cluster
    agent, told = await asked_to_stop(cluster, "leaving-2", job="cut-off")
    agent.terminate()
    assert agent.wait(20) == 0
    await cluster.client.acknowledge([told.id])


async def test_an_idle_agent_tells_and_ends(shared_cluster: LocalCluster) -> None:
    """The controller has it before the goodbye, so that the end of the connection is no surprise."""
    agent = shared_cluster.start_agent("leaving-3")
    await shared_cluster.node("leaving-3")
    agent.terminate()
    assert agent.wait(20) == 0
    told = await leaving(shared_cluster, "leaving-3")
    await shared_cluster.client.acknowledge([told.id])


async def test_a_spot_notice_is_told(shared_cluster: LocalCluster, metadata: MetadataService) -> None:
    ends = datetime.now(UTC) + timedelta(seconds=120)
    metadata.announces("terminate", ends.strftime("%Y-%m-%dT%H:%M:%SZ"))
    shared_cluster.start_agent("leaving-4", "--spot-notices", metadata.url)
    told = await leaving(shared_cluster, "leaving-4")
    assert told.body == NodeLeaving(
        reason="a spot interruption notice says terminate", leaves_at=ends.replace(microsecond=0).timestamp()
    )
    await shared_cluster.client.acknowledge([told.id])
