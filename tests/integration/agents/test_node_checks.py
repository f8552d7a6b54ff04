"""The node check on real agents: real processes exchange data over gloo, some spoiled on purpose, one behind a bad link."""

import asyncio
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import local_cluster
import pytest
import pytest_asyncio
from bad_link import BadLink, Pass, flipping, slowed
from local_cluster import LocalCluster

from flows import checking
from flows.response import plain
from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.inquiries import CheckNode
from unicron_lib.agent.messages import Command, OpenRendezvous, Reply, StopRanks
from unicron_lib.diagnosis.check_consequences import SLOW
from unicron_lib.domain.events import FailureDetected
from unicron_lib.domain.failures import ErrorKind, Failure
from unicron_lib.journal import Journal
from unicron_lib.local.site import Site, save_site
from unicron_lib.training.check import GATHER_BYTES, GATHERS

JOB = "node-check"
DEADLINE_S = 120.0
PRELOAD = ("--preload", "unicron_lib.training.check", "--preload", "unicron_lib.training.rendezvous")
HARMS = ("crash", "memory", "hang")
numbers = itertools.count(1)
pytestmark = pytest.mark.asyncio(loop_scope="module")


def start(cluster: LocalCluster, node: str, harm: str = "") -> None:
    """An agent whose checks do that harm."""
    os.environ["UNICRON_CHECK_HARM"] = harm
    try:
        cluster.start_agent(node, *PRELOAD, "--rendezvous-target", "unicron_lib.training.rendezvous:main")
    finally:
        del os.environ["UNICRON_CHECK_HARM"]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents join once they have imported torch."""
    monkeypatch.setattr(local_cluster, "DEADLINE_S", DEADLINE_S)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes(shared_cluster: LocalCluster) -> LocalCluster:
    """A cluster with three sound nodes; one that does harm, which has its name, is started for the first test of it."""
    for name in ("sound", "other", "behind"):
        start(shared_cluster, name)
    return shared_cluster


async def joined(cluster: LocalCluster, *names: str) -> None:
    """They are connected: what it takes until torch is imported."""
    known = {view.node for view in await cluster.client.nodes()}
    for harm in set(names) & set(HARMS) - known:
        start(cluster, harm, harm)
    await asyncio.gather(*(cluster.node(name) for name in names))


async def meet(cluster: LocalCluster, generation: int, *nodes: str, deadline_s: float = DEADLINE_S) -> list[Reply]:
    """The answers of a meeting; its store is gone afterwards."""
    opening = OpenRendezvous(step=f"open-{generation}", job=JOB, generation=generation)
    opened = await cluster.client.command(nodes[0], opening)
    assert opened.ok, opened.error
    where = {"master_addr": opened.result["address"], "master_port": opened.result["port"]}
    commands = [
        CheckNode(
            step=f"check-{generation}-{rank}",
            job=JOB,
            generation=generation,
            rank=rank,
            world_size=len(nodes),
            deadline_s=deadline_s,
            **where,
        )
        for rank in range(len(nodes))
    ]
    asking = zip(nodes, commands, strict=True)
    replies = await asyncio.gather(*(cluster.client.command(n, c, timeout_s=deadline_s + 20) for n, c in asking))
    stopping = StopRanks(step=f"stop-{generation}", job=JOB, below_generation=generation + 1, grace_s=1.0)
    assert (await cluster.client.command(nodes[0], stopping)).ok
    return replies


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("", ""),
        pytest.param("crash", "ended with code -6", marks=pytest.mark.storm),
        pytest.param("memory", "words read back otherwise", marks=pytest.mark.storm),
    ],
)
async def test_a_pair_of_which_one_may_be_spoiled(nodes: LocalCluster, harm: str, told: str) -> None:
    other = harm or "other"
    await joined(nodes, "sound", other)
    deadline_s = 20.0 if harm == "crash" else DEADLINE_S  # which the other one waits for
    sound, spoiled = await meet(nodes, next(numbers), "sound", other, deadline_s=deadline_s)
    assert sound.ok, sound.error
    assert spoiled.ok, spoiled.error
    own = harm == "memory"
    assert sound.result["exchanged"] == spoiled.result["exchanged"] == (harm == "" or own)
    assert sound.result["faults"] == []
    assert [fault["test"] for fault in spoiled.result["faults"]] == ([harm] if own else [])
    words = spoiled.result["faults"][0]["text"] if own else spoiled.result["error"]
    assert told in words
    if not harm:
        assert min(sound.result["gather_s"], sound.result["compute_s"]) > 0


@pytest.mark.storm
async def test_one_that_hangs_is_ended_at_the_deadline_and_its_devices_have_spoken(nodes: LocalCluster) -> None:
    await joined(nodes, "sound", "hang")
    replies = await meet(nodes, next(numbers), "sound", "hang", deadline_s=25.0)
    for reply in replies:
        assert reply.ok, reply.error
        assert not reply.result["exchanged"]
        assert reply.result["compute_s"] > 0
    assert replies[1].result["error"] == "not done within 25 s"


async def test_a_node_with_ranks_is_not_checked_and_a_job_ends_a_check(nodes: LocalCluster) -> None:
    number = next(numbers)
    await joined(nodes, "sound")
    opened = await nodes.client.command("sound", OpenRendezvous(step="o", job=JOB, generation=number))
    alone = CheckNode(
        step="alone",
        job=JOB,
        generation=number,
        rank=0,
        world_size=2,  # the other one never comes
        master_addr=opened.result["address"],
        master_port=opened.result["port"],
        deadline_s=DEADLINE_S,
    )
    checking = asyncio.create_task(nodes.client.command("sound", alone, timeout_s=DEADLINE_S))
    log = nodes.directory / "run" / "logs" / JOB / f"g{number}-sound-0.log"

    async def begun() -> bool:
        return log.exists()

    await local_cluster.eventually(begun, "the check runs")
    await nodes.launch(node="sound", ranks=1)
    given_up = await checking
    assert not given_up.ok
    assert "ranks are launched" in given_up.error
    refused = await nodes.client.command("sound", dataclasses.replace(alone, step="again"))
    assert not refused.ok
    assert "ranks of a live on sound" in refused.error
    stopping = StopRanks(step="stop-a", job="a", below_generation=2, grace_s=1.0)
    assert (await nodes.client.command("sound", stopping)).ok


async def test_the_command_finds_and_journals_who_is_faulty(nodes: LocalCluster) -> None:
    named = ["sound", "other", "memory"]
    await joined(nodes, *named)
    ports = {"prefect_port": local_cluster.free_port(), "controller_port": nodes.port}
    save_site(Site(cluster_id="test", home=str(nodes.directory), num_nodes=3, gpus_per_node=2, **ports))
    env = {**os.environ, "UNICRON_HOME": str(nodes.directory)}
    program = [Path(sys.executable).with_name("unicron"), "nodes", "--check", *named, "--json"]
    run = functools.partial(subprocess.run, program, env=env, capture_output=True, text=True, timeout=200, check=False)
    done = await asyncio.to_thread(run)
    assert done.returncode == 1, done.stderr
    rows = {row["node"]: row for row in json.loads(done.stdout)["nodes"]}
    assert [rows[name]["verdict"] for name in named] == ["good", "good", "faulty"], rows
    (failure,) = failures(nodes)
    assert (failure.node, failure.kind) == ("memory", ErrorKind.ECC_ERROR)
    assert "words read back otherwise" in failure.evidence


def failures(cluster: LocalCluster) -> list[Failure]:
    entries = Journal(open_store(cluster.store_url)).entries()
    return [entry.event.failure for entry in entries if isinstance(entry.event, FailureDetected)]


# --- one node behind a proxy on the real traffic ---


class Behind:
    """The controller, for a flow; the check of the node `behind` reaches its store, and so the others, by a bad link."""

    def __init__(self, cluster: LocalCluster, link: BadLink) -> None:
        self._client = cluster.client
        self._link = link

    async def command(self, node: str, wanted: Command, *, timeout_s: float) -> Reply:
        if isinstance(wanted, CheckNode) and node == "behind":
            wanted = dataclasses.replace(wanted, master_port=await self._link.to_store(wanted.master_port))
        return await self._client.command(node, wanted, timeout_s=timeout_s)


async def tell_nobody(*_: object) -> None:
    """There is no Prefect."""


async def check_behind(cluster: LocalCluster, harm: Pass, monkeypatch: pytest.MonkeyPatch, *named: str) -> dict[str, str]:
    """The verdicts of the real flow over the real agents."""
    await joined(cluster, *named)
    link = BadLink(harm)
    made = SimpleNamespace(journal=Journal(open_store(cluster.store_url)), controller=Behind(cluster, link))
    monkeypatch.setattr("tasks.health.emit", tell_nobody)
    for module in ("flows.checking", "tasks.checking", "tasks.health"):
        monkeypatch.setattr(f"{module}.services", lambda: made)
    try:
        rows = await checking.check(plain, list(named), DEADLINE_S)
    finally:
        await link.close()
    (behind,) = [row for row in rows if row["node"] == "behind"]
    assert link.num_connections == behind["meetings"] == 2, "data came by another way"
    assert link.num_bytes > 2 * 2 * (GATHERS + 1) * GATHER_BYTES, "of both meetings, both directions"
    return {str(row["node"]): str(row["verdict"]) for row in rows}


async def test_a_link_that_flips_bits_makes_its_node_faulty_and_nobody_else(nodes, monkeypatch) -> None:
    known = len(failures(nodes))
    found = await check_behind(nodes, flipping(1 << 20), monkeypatch, "behind", "sound", "other")
    assert found == {"behind": "faulty", "sound": "good", "other": "good"}
    (failure,) = failures(nodes)[known:]
    assert (failure.node, failure.kind) == ("behind", ErrorKind.NETWORK_ERROR)
    assert "arrived damaged" in failure.evidence


async def test_a_link_that_is_slow_makes_its_node_a_straggler_and_nobody_else(nodes, monkeypatch) -> None:
    known = len(failures(nodes))
    found = await check_behind(nodes, slowed(10 << 20), monkeypatch, "sound", "other", "behind")
    assert found == {"behind": "straggler", "sound": "good", "other": "good"}
    assert failures(nodes)[known:] == []
    state = Journal(open_store(nodes.store_url)).refresh()
    assert "times as long as usual" in state.nodes["behind"].notes[SLOW]
    assert not state.nodes["sound"].notes
    assert not state.nodes["other"].notes
