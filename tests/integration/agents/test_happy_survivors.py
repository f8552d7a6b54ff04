"""Nodes of a job die whose ranks have no collective to fail in: the loss is ours to see, and is answered all the same.

Real controller, agents and processes; the recovery is the plain sequence in the test's own process.
"""

import asyncio
import os
import signal
from dataclasses import dataclass

import psutil
import pytest
from local_cluster import LocalCluster, eventually

from flows import response
from flows.response import plain, respond
from tasks.health import report
from tasks.services import Services
from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.messages import NodeUnreachable, OpenRendezvous
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.config import Settings
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import JobSubmitted
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobSpec, JobStatus
from unicron_lib.domain.recovery import Policy
from unicron_lib.domain.timeline import timing
from unicron_lib.journal import Journal

NODES = ("n0", "n1", "n2")
TABLE = {2: 1.0e9, 4: 2.0e9, 6: 3.0e9}


@dataclass
class Site:
    cluster: LocalCluster
    agents: dict[str, psutil.Process]
    journal: Journal
    store: ObjectStore
    opened: dict[str, str]

    async def power_off(self, node: str) -> None:
        """The agent and everything below it, at once."""
        agent = self.agents[node]
        everyone = [agent, *agent.children(recursive=True)]
        assert len(everyone) > 2, "it runs ranks"
        for process in everyone:
            if process.is_running():
                os.kill(process.pid, signal.SIGKILL)

    async def heal(self) -> None:
        """What health task and recovery do from the first observation on."""
        observation = await self.cluster.observation("node_unreachable")
        assert isinstance(observation.body, NodeUnreachable)
        await report(observation)
        await respond(plain)


@pytest.fixture
async def site(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch):
    """Three nodes of two ranks and a job on all of them, with fake ranks that merely step."""
    agents = {"n0": psutil.Process(cluster.processes[1].pid)}
    agents |= {node: psutil.Process(cluster.start_agent(node).pid) for node in NODES[1:]}
    for node in NODES:
        await cluster.node(node)
    store = open_store(cluster.store_url)
    settings = Settings(store_url=cluster.store_url, controller_url="unused", token="unused", drain_s=1.0)
    made = Services(settings=settings, store=store, journal=Journal(store), controller=cluster.client)
    for module in ("tasks.health", "tasks.planning", "tasks.transition", "tasks.memory", "tasks.sending", "flows.response"):
        monkeypatch.setattr(f"{module}.services", lambda: made)
    monkeypatch.setattr("tasks.events.emit_event", lambda **_: None)
    eager, decide = Policy(root_cause_grace_s=0.0, settle_s=0.0), response.decide
    monkeypatch.setattr(response, "decide", lambda state, now, _: decide(state, now, eager))
    command, opened = cluster.client.command, {}

    async def noted(node, wanted, **keys):
        if isinstance(wanted, OpenRendezvous):
            opened[wanted.step] = node  # RESTORE asks for it, and LAUNCH once more
        return await command(node, wanted, **keys)

    monkeypatch.setattr(cluster.client, "command", noted)
    spec = JobSpec(job="a", min_gpus=2, max_gpus=6, data_path="fake:alone", throughput_flops=TABLE, global_batch_size=12)
    made.journal.append(JobSubmitted(id="s", at=0.0, submission="1", spec=spec))
    await respond(plain)
    assert made.journal.state.jobs["a"].nodes == set(NODES)
    return Site(cluster, agents, made.journal, store, opened)


@pytest.mark.parametrize("which", ["store", pytest.param("middle", marks=pytest.mark.storm), "last"])
async def test_a_node_that_dies_while_all_others_are_happy_is_recovered_from(site: Site, which: str) -> None:
    """PB18, PB19, PB58: the node of the rendezvous store and rank 0, or any other one; no rank complains."""
    *before, store_host = site.opened.values()  # a start may have taken more than one plan
    node = {"store": store_host, "middle": "n1", "last": "n2"}[which]
    await site.power_off(node)
    await site.heal()
    state = site.journal.refresh()
    job = state.jobs["a"]
    assert (job.status, job.gpus, job.nodes) == (JobStatus.RUNNING, 4, set(NODES) - {node})
    assert state.nodes[node].status is NodeStatus.LOST
    (incident,) = [it for it in state.incidents.values() if it.is_failure]
    assert (incident.kind, incident.node, incident.status) == (ErrorKind.NODE_LOST, node, IncidentStatus.CLOSED)
    assert len(incident.failures) == 1, "its own heartbeat told, not a rank"
    assert list(site.opened.values())[-1] in job.nodes, "the new generation has its store on a survivor"
    assert len(site.opened) == len(before) + 2
    assert timing(state, incident).first_iteration_s is not None

    async def steps() -> bool:
        live = await site.cluster.client.job_progress("a")
        return live is not None and live.generation == job.generation and live.iteration > 0

    await eventually(steps, "the new generation trains")


async def test_survivors_that_are_merely_slow_to_answer_are_no_loss(site: Site) -> None:
    """PB19: nothing is reported while all nodes live, however long nobody looks."""
    assert await site.cluster.client.observations(wait_s=2.0) == ()
    assert {node.status for node in site.journal.refresh().nodes.values()} == {NodeStatus.READY}
    await asyncio.gather(*(site.cluster.node(node) for node in NODES))
