"""`unicron nodes --release`: a quarantine outlives the agent and ends by an operator's word, once the agent is there."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from local_cluster import LocalCluster, eventually

from unicron_lib.adapters.stores import open_store
from unicron_lib.domain.cluster import Node, NodeStatus
from unicron_lib.domain.events import NodeReleased, PlanDecided
from unicron_lib.domain.plans import Plan, PlanKind
from unicron_lib.journal import Journal
from unicron_lib.local.site import Site, save_site

WHY = "ecc_error on n0"


async def unicron(cluster: LocalCluster, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command against the cluster."""
    env = {**os.environ, "UNICRON_HOME": str(cluster.directory)}
    program = [Path(sys.executable).with_name("unicron"), *arguments]
    done = await asyncio.to_thread(subprocess.run, program, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


async def joined(journal: Journal, *, after: str = "") -> Node:
    """n0 as the journal has it, once a life of it is there that is not `after`: it is connected a moment earlier."""

    async def ask() -> Node | None:
        node = journal.refresh().nodes.get("n0")
        return node if node and node.boot != after else None

    return await eventually(ask, "n0 has joined")


async def quarantine(cluster: LocalCluster) -> Journal:
    """A plan isolates n0."""
    port = cluster.client._url.rpartition(":")[2]
    ports = {"prefect_port": 1, "controller_port": int(port)}
    save_site(Site(cluster_id="test", home=str(cluster.directory), num_nodes=1, gpus_per_node=2, **ports))
    journal = Journal(open_store(cluster.store_url))
    await joined(journal)
    basis = {"attempt": 0, "basis_seq": journal.refresh().seq, "reason": "for the test"}
    incidents = tuple(incident.id for incident in journal.state.open_incidents)
    plan = Plan(id="plan-1", kind=PlanKind.REALLOCATE, incidents=incidents, quarantined={"n0": WHY}, **basis)
    assert journal.append(PlanDecided(id="decided/plan-1", at=0.0, plan=plan))
    assert journal.state.nodes["n0"].status is NodeStatus.QUARANTINED
    return journal


async def test_a_quarantine_ends_by_release(cluster: LocalCluster) -> None:
    journal = await quarantine(cluster)
    code, out, _ = await unicron(cluster, "nodes")
    assert (code, WHY in out) == (0, True), out
    _, out, _ = await unicron(cluster, "nodes", "--json")
    assert [(row["status"], row["reason"]) for row in json.loads(out)["nodes"]] == [("quarantined", WHY)]

    agent = cluster.processes[1]
    agent.terminate()
    await cluster.node(connected=False)
    agent.wait()
    code, _, told = await unicron(cluster, "nodes", "--release", "n0")
    assert (code, "n0 has no connection" in told) == (2, True), told

    boot = journal.refresh().nodes["n0"].boot
    cluster.start_agent()
    again = await joined(journal, after=boot)
    assert again.status is NodeStatus.QUARANTINED
    code, out, _ = await unicron(cluster, "nodes", "--release", "n0", "--json")
    assert (code, json.loads(out)) == (0, {"node": "n0", "status": "ready"})
    event = journal.entries()[-1].event
    assert isinstance(event, NodeReleased)
    assert event.id == f"released/n0/{again.boot}/{event.at:.3f}"
    assert journal.refresh().nodes["n0"].status is NodeStatus.READY


async def test_only_a_quarantined_node_can_be_released(cluster: LocalCluster) -> None:
    journal = await quarantine(cluster)
    seq = journal.state.seq
    code, _, told = await unicron(cluster, "nodes", "--release", "n7")
    assert (code, told) == (2, "unicron: no node 'n7': there are n0\n")
    assert (await unicron(cluster, "nodes", "--release", "n0"))[0] == 0
    code, _, told = await unicron(cluster, "nodes", "--release", "n0")
    assert (code, told) == (2, "unicron: n0 is ready, not quarantined: in quarantine are none\n")
    assert journal.refresh().seq == seq + 1
