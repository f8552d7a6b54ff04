"""A node's announcement on its way through the flows: journalled, told to Prefect, answered by a move that nobody pays for."""

import time

import pytest
from fake_site import FakeAgents

from flows.response import plain, respond
from tasks import events
from tasks.health import report
from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.messages import Observation
from unicron_lib.controller.observations import concerns
from unicron_lib.detection.classify import classify
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import FailureDetected, NodeJoined
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobStatus

BODY = NodeLeaving(reason="a spot interruption notice says terminate", leaves_at=time.time() + 120.0, jobs=("gpt-a",))


@pytest.fixture
def told(monkeypatch):
    """What Prefect is told, by name."""
    found = {}
    monkeypatch.setattr("tasks.events.emit_event", lambda **it: found.setdefault(it["event"], it))
    return found


def leaving(node):
    return Observation(node=node, boot="b", seq=0, at=time.time(), body=BODY)


async def lose(site, node):
    failure = Failure(
        id=f"{node}/b/-1",
        kind=ErrorKind.NODE_LOST,
        method=DetectionMethod.NODE_HEALTH,
        seen_at=time.time(),
        node=node,
        boot="b",
    )
    site.journal.append(FailureDetected(id=failure.id, at=time.time(), failure=failure))
    await site.respond()


async def test_an_announcement_is_no_failure_and_the_train_flow_of_the_jobs_takes_it_at_once(site):
    observation = leaving("node-1")
    assert classify(observation) is None
    assert concerns(observation, "gpt-a")
    assert not concerns(observation, "gpt-b")


async def test_a_node_that_leaves_is_emptied_while_its_job_goes_on_from_memory(site, told):
    generation = site.journal.state.jobs["gpt-a"].generation
    incident = await report(leaving("node-1"))
    assert await report(leaving("node-1")) == incident, "told twice, it is one"
    await site.respond()
    state = site.journal.state
    job = state.jobs["gpt-a"]
    assert (job.status, job.generation, job.assignment.nodes) == (JobStatus.RUNNING, generation + 1, ("node-2",))
    assert (job.failed_times, job.stuck_restarts) == ((), 0)
    assert site.agents.adopted == [("node-2", "gpt-a", generation + 1)], "who stays keeps its process and its memory"
    assert {node for node, _ in site.agents.running} == {"node-2"}
    assert state.incidents[incident].status is IncidentStatus.CLOSED
    payload = told["unicron.node.leaving"]["payload"]
    assert (payload["reason"], payload["leaves_at"]) == (BODY.reason, BODY.leaves_at)
    assert told["unicron.node.leaving"]["resource"]["prefect.resource.id"] == "unicron.node.node-1"
    assert {it["prefect.resource.id"] for it in told[events.CLOSED]["related"]} == {"unicron.job.gpt-a", "unicron.node.node-1"}
    assert told[events.CLOSED]["payload"]["reason"].startswith(f"node-1 leaves: {BODY.reason}. ")


async def test_its_end_costs_nothing_and_the_next_life_is_used_again(site, told):
    await report(leaving("node-1"))
    await site.respond()
    steps, known = site.steps(), dict(site.journal.state.incidents)
    await lose(site, "node-1")
    assert (site.steps(), site.journal.state.incidents) == (steps, known)
    assert site.journal.state.nodes["node-1"].status is NodeStatus.LOST
    site.journal.append(NodeJoined(id="again", at=time.time(), node="node-1", boot="b2", address="a", num_gpus=2))
    await site.respond()
    assert set(site.journal.state.jobs["gpt-a"].assignment.nodes) == {"node-1", "node-2"}


async def test_a_job_all_of_whose_nodes_leave_is_saved_and_waits(site, monkeypatch):
    """Its checkpoint is committed by the ranks themselves, asked to drain; then they are stopped."""
    drained = {"rank": 0, "generation": 1, "state": "drained", "iteration": 7, "manifest": "gpt-a/1/7"}
    monkeypatch.setattr(FakeAgents, "_parked", lambda *_: [drained])
    for node in ("node-1", "node-2"):
        await report(leaving(node))
    site.agents.effects.clear()
    await site.respond()
    state = site.journal.state
    assert (state.jobs["gpt-a"].status, state.jobs["gpt-a"].gpus) == (JobStatus.QUEUED, 0)
    assert [kind for kind, _ in site.agents.effects] == ["drain_ranks"] * 2 + ["stop_ranks"] * 2
    results = [result for plan in state.plans.values() for result in plan.results.values()]
    assert {"source": "drained", "iteration": 7, "manifest": "gpt-a/1/7"} in results
    assert not site.agents.running
    for node in ("node-1", "node-2"):
        await lose(site, node)
    assert not [it for it in state.incidents.values() if it.is_failure]


async def test_a_node_that_is_gone_before_its_ranks_have_parted_is_a_loss_as_any_other(site):
    await report(leaving("node-1"))
    site.agents.gone.add("node-1")
    await lose(site, "node-1")
    state = site.journal.state
    assert [it.kind for it in state.incidents.values() if it.is_failure] == [ErrorKind.NODE_LOST]
    assert state.jobs["gpt-a"].assignment.nodes == ("node-2",)
    assert all(it.status in {IncidentStatus.CLOSED, IncidentStatus.MERGED} for it in state.incidents.values())


async def test_a_leaving_node_whose_agent_refuses_holds_nobody_up(site):
    """It goes anyway: neither is it blamed, nor waited for."""
    site.agents.refuse_on["node-1"] = "out of memory"
    await report(leaving("node-1"))
    await respond(plain)
    state = site.journal.state
    assert state.jobs["gpt-a"].assignment.nodes == ("node-2",)
    assert not [it for it in state.incidents.values() if it.is_failure]
