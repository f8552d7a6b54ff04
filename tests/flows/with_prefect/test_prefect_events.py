"""Events, automations and runs on a real server: nothing depends on how many of them arrive."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime

import yaml
from prefect import get_client
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter
from prefect.flow_engine import run_flow_async
from prefect.states import Completed, Running
from prefect_site import ROOT, recovery_service, register_quick, runs_of, until

from flows.burials import LEASE_S, bury_dead_answers
from flows.deployments import load, register
from flows.recovery import recover
from flows.response import plain, respond
from flows.watching import _start_another_run
from tasks.events import OPENED
from tasks.health import report_failure
from unicron_lib.agent.messages import GpuFault, Observation
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import FailureDetected, NodeJoined
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec, JobState

OVER = {IncidentStatus.CLOSED, IncidentStatus.MERGED}


def all_over(site):
    """Something has happened and nothing is left to do."""
    state = site.journal.refresh()
    failures = [it for it in state.incidents.values() if it.is_failure]
    return failures and state.active_plan is None and all(it.status in OVER for it in state.incidents.values())


def node_fault(node, seq):
    body = GpuFault(kind="ecc_error", gpu=seq, uuid=f"GPU-{node}-{seq}", evidence="uncorrected", jobs=())
    return Observation(node=node, boot="b", seq=seq, at=1.0, body=body)


def grow(site, num_nodes):
    for number in range(3, num_nodes + 1):
        joined = NodeJoined(id=f"j{number}", at=1.0, node=f"node-{number}", boot="b", address="a", num_gpus=2)
        site.journal.append(joined)


def failures(site):
    """Ids of all journalled failures."""
    return [entry.event.id for entry in site.journal.entries() if isinstance(entry.event, FailureDetected)]


async def test_one_failure_starts_exactly_one_run(with_prefect):
    """PB46: with the deployments and automations of `prefect.yaml` on a fresh server."""
    async with recovery_service():
        failure = Failure(id="f1", kind=ErrorKind.PROCESS_EXIT, method=DetectionMethod.PROCESS, seen_at=1.0, job="gpt-a")
        await report_failure(replace(failure, generation=1, rank=1, iteration=7))
        await until("the recovery", lambda: all_over(with_prefect))

        async def completed():
            return [run.state.name for run in await runs_of("recover")] == ["Completed"]

        await until("the run", completed)
    assert with_prefect.journal.state.jobs["gpt-a"].generation == 2


async def test_the_automation_starts_exactly_one_run_of_an_incident_that_stays_open(with_prefect, tmp_path):
    """PB46: the template of its parameters renders, its action does not fail, and the run heals."""
    began = datetime.now(UTC)
    await register_quick(tmp_path)
    failure = Failure(id="f1", kind=ErrorKind.PROCESS_EXIT, method=DetectionMethod.PROCESS, seen_at=1.0, job="gpt-a")
    await report_failure(replace(failure, generation=1, rank=1, iteration=7))
    await until("a run", lambda: runs_of("recover"))
    (run,) = await runs_of("recover")
    assert run.created_by.type == "AUTOMATION"
    assert run.parameters == {"incident": "open"}
    await run_flow_async(recover, flow_run=run, parameters=run.parameters)
    assert all_over(with_prefect)
    assert [run.state.name for run in await runs_of("recover")] == ["Completed"]
    named = EventNameFilter(name=["prefect.automation.action.failed"])
    async with get_client() as client:
        page = await client.read_events(EventFilter(event=named, occurred=EventOccurredFilter(since=began)), limit=50)
    assert page.events == []


async def test_ten_failures_at_once_of_five_nodes(with_prefect):
    """PB45: all are journalled, five incidents are answered, whatever Prefect makes of the events."""
    grow(with_prefect, 12)
    async with recovery_service():
        await until("the new nodes are planned for", lambda: not with_prefect.journal.refresh().open_incidents)
        nodes = [f"node-{number}" for number in range(1, 6)]
        with_prefect.controller.observe(*(node_fault(node, seq) for seq in (0, 1) for node in nodes))
        await until("all is reported", lambda: not with_prefect.controller.waiting)
        await until("all is over", lambda: all_over(with_prefect))
    state = with_prefect.journal.state
    assert sorted(failures(with_prefect)) == sorted(f"{node}/b/{seq}" for seq in (0, 1) for node in nodes)
    found = [it for it in state.incidents.values() if it.is_failure and it.status is IncidentStatus.CLOSED]
    assert sorted(it.node for it in found) == nodes
    assert {state.nodes[node].status for node in nodes} == {NodeStatus.QUARANTINED}
    assert not state.jobs["gpt-a"].nodes & set(nodes)


async def test_ten_failures_at_once_of_one_node(with_prefect):
    """PB45: one incident."""
    grow(with_prefect, 4)
    async with recovery_service():
        with_prefect.controller.observe(*(node_fault("node-2", seq) for seq in range(10)))
        await until("all is reported", lambda: not with_prefect.controller.waiting)
        await until("all is over", lambda: all_over(with_prefect))
    found = [it for it in with_prefect.journal.state.incidents.values() if it.is_failure]
    assert [it.node for it in found] == ["node-2"]
    assert len(failures(with_prefect)) == 10


async def test_a_run_that_died_blocks_nobody(with_prefect):
    """PB52: its process was killed, Prefect believes that it runs, and holds nothing for it."""
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert not [it["name"] for it in deployments if "concurrency_limit" in it], "what dies would hold a slot"
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("recover/recover")
        dead = await client.create_flow_run_from_deployment(deployment.id, parameters={"incident": "inc-of-old"})
        await client.set_flow_run_state(dead.id, Running(), force=True)
    async with recovery_service():
        with_prefect.fail("f1")
        await until("the recovery", lambda: all_over(with_prefect))
    assert StateType.RUNNING in {run.state.type for run in await runs_of("recover") if run.id == dead.id}


async def test_a_run_that_died_does_not_claim_to_be_running_for_ever(with_prefect):
    """PB48: `recover` is found in Prefect as crashed once its incident is over; one that has something to do is left alone."""
    with_prefect.fail("f1")
    (incident,) = with_prefect.journal.refresh().open_incidents
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("recover/recover")
        for wanted in (incident.id, "open"):
            run = await client.create_flow_run_from_deployment(deployment.id, parameters={"incident": wanted})
            await client.set_flow_run_state(run.id, Running(), force=True)
        done = await client.create_flow_run_from_deployment(deployment.id, parameters={"incident": incident.id})
        await client.set_flow_run_state(done.id, Completed(), force=True)

    async def claims():
        return sorted(run.state.name for run in await runs_of("recover"))

    await bury_dead_answers(time.time() + 10 * LEASE_S)
    assert await claims() == ["Completed", "Running", "Running"], "the incident is open"
    await respond(plain)
    assert all_over(with_prefect)
    await bury_dead_answers(time.time())
    assert await claims() == ["Completed", "Running", "Running"], "they may be telling it this moment"
    await bury_dead_answers(time.time() + LEASE_S + 1.0)
    assert await claims() == ["Completed", "Crashed", "Crashed"]


async def test_a_job_without_a_worker_gets_one_more_run_and_not_one_each_time(with_prefect, tmp_path):
    """PB48: its run has died and no worker takes up the next one for hours; when one comes, the job is taken up once."""
    entry = {"name": "gpt-x", "entrypoint": "flows.training.train", "parameters": {"job": {"job": "gpt-x"}}, "pull": []}
    file = tmp_path / "gpt-x.yaml"
    file.write_text(yaml.safe_dump({"name": "gpt-x", "deployments": [{**entry, "work_pool": {"name": "unicron"}}]}))
    await register(load(file))
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("train/gpt-x")
        first = await client.create_flow_run_from_deployment(deployment.id)
        job = JobState(spec=JobSpec(job="gpt-x"), submission=str(first.id))
        await _start_another_run("gpt-x", job)
        assert [run.id for run in await runs_of("gpt-x")] == [first.id], "it still waits for a worker"
        await client.set_flow_run_state(first.id, Running(), force=True)
    for _ in range(3):
        await _start_another_run("gpt-x", job)
    assert [run.state.type for run in await runs_of("gpt-x")] == [StateType.CRASHED, StateType.SCHEDULED]


async def test_a_flood_of_events_delays_no_recovery_and_loses_no_failure(with_prefect):
    """PB54: thousands of events on SQLite while failures are answered."""
    flood = asyncio.create_task(asyncio.to_thread(pour, 3000))
    async with recovery_service():
        for number in range(3):
            with_prefect.fail(f"f{number}", iteration=10 + number)
            wanted = number + 2
            await until("the recovery", lambda wanted=wanted: with_prefect.journal.refresh().jobs["gpt-a"].generation == wanted)
            await until("calm", lambda: all_over(with_prefect))
        await flood

        async def recorded():
            return {run.state.name for run in await runs_of("recover")} == {"Completed"}

        await until("every run is told as completed", recorded)
    assert failures(with_prefect) == ["f0", "f1", "f2"]


def pour(count):
    for number in range(count):
        emit_event(event=f"{OPENED}.test", resource={"prefect.resource.id": f"unicron.flood.{number}"})
