"""A rank that stands still, from its page through agent and controller to an observation."""

import os
import signal
import time

import psutil
import pytest
from beating_rank import WARM
from local_cluster import LocalCluster, descendants, eventually, pids

from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import RankResumed, RankStalled

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


async def test_a_hanging_rank_is_reported_and_its_return_too(cluster: LocalCluster) -> None:
    """PB23 on a real agent; the job is fast, so that the floor of the limit counts."""
    cluster.start_agent("n1", "--rank-target", "beating_rank:main")
    await cluster.node("n1")
    reply = await cluster.launch(node="n1", job="pacing")
    stopped = pids(reply)[1]

    async def is_warm() -> bool:
        seen = await cluster.client.job_progress("pacing")
        return seen is not None and seen.iteration > 60

    await eventually(is_warm, "the pace is known")
    began = time.time()
    assert (await cluster.client.command("n1", InjectFault(step="x", fault="hang", job="pacing", rank=1))).ok
    seen = await cluster.observation("rank_stalled", "pacing")
    assert psutil.Process(stopped).status() == psutil.STATUS_STOPPED
    assert isinstance(seen.body, RankStalled)
    assert (seen.node, seen.body.rank, seen.body.generation) == ("n1", 1, 1)
    print(f"seen {seen.at - began:.3f} s after the injection was asked for; {seen.body}")  # noqa: T201
    os.kill(stopped, signal.SIGCONT)
    back = await cluster.observation("rank_resumed", "pacing")
    assert isinstance(back.body, RankResumed)
    assert back.body.rank == 1
    waiting = await cluster.client.observations(job="pacing", wait_s=0.1)
    assert {observation.body.rank for observation in waiting} == {1}


async def test_a_rank_that_sleeps_for_ever_is_told_with_what_was_seen_of_its_process(cluster: LocalCluster) -> None:
    cluster.start_agent("n2", "--rank-target", "beating_rank:deadlock")
    await cluster.node("n2")
    await cluster.launch(node="n2", job="sleeping")
    seen = await cluster.observation("rank_stalled", "sleeping")
    assert isinstance(seen.body, RankStalled)
    assert (seen.body.section, seen.body.iteration) == ("step", WARM - 1)
    assert 0.0 < seen.body.still_s < seen.body.silent_s


async def test_pages_are_gone_with_their_agent(cluster: LocalCluster) -> None:
    agent = cluster.start_agent("n3", "--rank-target", "beating_rank:main")
    await cluster.node("n3")
    await cluster.launch(node="n3", job="paged")
    link = cluster.directory / "run" / "agents" / f"n3-{agent.pid}" / "beats"
    if not link.exists():  # a long path: the agent's directory is elsewhere
        (rank,) = [p for p in descendants(agent) if p.environ().get("RANK") == "0"]
        link = type(link)(rank.environ()["UNICRON_BEAT_FILE"]).parent

    async def pages() -> bool:
        return len(list(link.iterdir())) == 2

    await eventually(pages, "each rank has made its page")
    place = link.resolve()
    agent.send_signal(signal.SIGINT)
    agent.wait(20)
    assert not place.exists()
