"""`unicron doctor --prefect`: it finds out what would leave an incident alone."""

import asyncio
import contextlib

import pytest
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.flow_engine import run_flow_async
from prefect_site import register_quick, runs_of, until

from flows import smoke
from flows.deployments import POOL
from flows.recovery import recover


@pytest.fixture
async def worker(with_prefect):
    """Somebody who polls the pool and carries runs out."""

    async def work():
        async with get_client() as client:
            while True:
                await client.send_worker_heartbeat(POOL, "the-tests")
                for run in await runs_of("recover"):
                    if run.state.is_scheduled():
                        await run_flow_async(recover, flow_run=run, parameters=run.parameters)
                await asyncio.sleep(0.2)  # as a worker does

    working = asyncio.create_task(work())
    yield
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


def told(findings):
    return [(it["what"], it["ok"]) for it in findings]


async def test_one_event_starts_exactly_one_run(with_prefect, worker, tmp_path):
    """PB46: through the real automation, by somebody who polls the pool; the journal hears nothing of it."""
    seq = with_prefect.journal.refresh().seq
    await register_quick(tmp_path)
    await until("the worker", online)
    found = await smoke.findings()
    assert [it["ok"] for it in found] == [True] * 4, found
    assert [run.state.name for run in await runs_of("recover")] == ["Completed"]
    assert "has started one run" in found[-1]["found"]
    assert with_prefect.journal.refresh().seq == seq


async def test_a_template_that_does_not_render_is_found(with_prefect, worker, tmp_path):
    """PB46: an id is no JSON unless it is made a string."""
    await register_quick(tmp_path, parameters={"incident": "{{ event.id }}"})
    await until("the worker", online)
    found = await smoke.findings()
    assert told(found)[-1] == ("Prefect", False)
    assert "could not act" in found[-1]["found"]
    assert await runs_of("recover") == []


async def test_an_automation_that_is_off_is_found(with_prefect, worker):
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("recover/recover")
        (automation,) = await client.read_resource_related_automations(f"prefect.deployment.{deployment.id}")
        await client.pause_automation(automation.id)
    found = await smoke.findings()
    assert told(found) == [("Prefect deployments", True), ("Prefect", False)]
    assert "off: deploy prefect.yaml again" in found[-1]["found"]


async def test_flows_that_are_not_deployed_are_found(with_prefect):
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("recover/recover")
        await client.delete_deployment(deployment.id)
    assert [it["found"] for it in await smoke.findings()] == [
        "recover or reconfigure is not deployed: run `python -m flows.deployments prefect.yaml`"
    ]


async def test_a_pool_that_nobody_polls_is_found(with_prefect, monkeypatch):
    async with get_client() as client:
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name="nobodys", type="process"))
    monkeypatch.setattr(smoke, "POOL", "nobodys")
    (*_, last) = await smoke.findings()
    assert last == {"what": "Prefect", "ok": False, "found": last["found"]}
    assert "no worker polls the pool 'nobodys'" in last["found"]


async def online():
    async with get_client() as client:
        return any(it.status == "ONLINE" for it in await client.read_workers_for_work_pool(POOL))
