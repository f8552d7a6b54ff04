"""Prove on the Prefect server that is named that the safety net holds: a test incident starts exactly one recovery run.

The test incident is one of Prefect's events only. The journal does not know it, so the run finds nothing to do.
"""

import argparse
import asyncio
import json
import sys
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import httpx
from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import Event, Resource
from prefect.events.clients import get_events_client
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.events.schemas.automations import Automation
from prefect.exceptions import ObjectNotFound, PrefectException

from flows.deployments import POOL
from tasks.events import OPENED

LATE_S = 40.0
"""Prefect looks every few seconds for events that did not come."""
LOOK_S = 0.5
ACTION = "prefect.automation.action."
Finding = dict[str, str | bool]


class Broken(Exception):
    """What keeps the safety net from holding, and what to do."""


async def findings() -> list[Finding]:
    """Every check up to the first that fails."""
    found: list[Finding] = []
    async with get_client() as client:
        try:
            deployment = await _deployment(client)
            found.append(_fine("Prefect deployments", "recover and reconfigure"))
            automation = await _automation(client, deployment)
            found.append(_fine("Prefect automation", f"{automation.name!r} is on"))
            found.append(_fine("Prefect worker", await _worker(client)))
            found.append(_fine("Prefect test event", await _one_run(client, deployment, automation)))
        except Broken as broken:
            found.append({"what": "Prefect", "ok": False, "found": str(broken)})
        except (httpx.HTTPError, PrefectException, OSError) as error:
            told = " ".join(str(error).split()) or type(error).__name__
            found.append({"what": "Prefect", "ok": False, "found": f"the server does not answer ({told}): start it"})
    return found


def _fine(what: str, found: str) -> Finding:
    return {"what": what, "ok": True, "found": found}


async def _deployment(client: PrefectClient) -> DeploymentResponse:
    try:
        await client.read_deployment_by_name("reconfigure/reconfigure")
        return await client.read_deployment_by_name("recover/recover")
    except ObjectNotFound:
        raise Broken("recover or reconfigure is not deployed: run `python -m flows.deployments prefect.yaml`") from None


async def _automation(client: PrefectClient, deployment: DeploymentResponse) -> Automation:
    owned = await client.read_resource_related_automations(f"prefect.deployment.{deployment.id}")
    if len(owned) != 1 or not owned[0].enabled:
        states = ", ".join(f"{it.name!r} {'on' if it.enabled else 'off'}" for it in owned) or "none"
        raise Broken(f"recover must have one automation that is on, it has {states}: deploy prefect.yaml again")
    return owned[0]


async def _worker(client: PrefectClient) -> str:
    workers = await client.read_workers_for_work_pool(POOL)
    online = [worker.name for worker in workers if worker.status == "ONLINE"]
    if not online:
        raise Broken(f"no worker polls the pool {POOL!r}: run `prefect worker start --pool {POOL}`")
    return f"{len(online)} at the pool {POOL!r}"


async def _one_run(client: PrefectClient, deployment: DeploymentResponse, automation: Automation) -> str:
    began, incident = datetime.now(UTC), f"doctor-{uuid.uuid4().hex[:10]}"
    resource = Resource.model_validate({"prefect.resource.id": f"unicron.incident.{incident}"})
    async with get_events_client() as events:
        await events.emit(Event(event=OPENED, resource=resource))
    within = getattr(automation.trigger, "within", None)
    limit_s = LATE_S + (within.total_seconds() if within else 0.0)
    try:
        async with asyncio.timeout(limit_s):
            await _until(lambda: _acted(client, automation, began))
            await _until(lambda: _all_ended(client, deployment, automation, began))
    except TimeoutError:
        late = f"{limit_s:.0f} s after a test event no run has ended"
        raise Broken(f"{late}: see the worker's log and the page of {automation.name!r}") from None
    runs = await _runs(client, deployment, automation, began)
    if len(runs) != 1:
        raise Broken(f"{len(runs)} runs have been started: unless other incidents were open, look at {automation.name!r}")
    return f"{OPENED} has started one run, {runs[0].name}, which is {runs[0].state_name}"


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    while not await holds():  # noqa: ASYNC110 - a poll of a remote condition
        await asyncio.sleep(LOOK_S)


async def _acted(client: PrefectClient, automation: Automation, since: datetime) -> bool:
    """Whether the automation has acted. Raises Broken if it could not."""
    wanted = EventFilter(
        event=EventNameFilter(prefix=[ACTION]),
        resource=EventResourceFilter(id=[f"prefect.automation.{automation.id}"]),
        occurred=EventOccurredFilter(since=since),
    )
    page = await client.read_events(wanted, limit=50)
    failed = [event for event in page.events if event.event == f"{ACTION}failed"]
    if failed:
        raise Broken(f"the automation {automation.name!r} could not act: {failed[0].payload.get('reason')}")
    return any(event.event == f"{ACTION}executed" for event in page.events)


async def _runs(
    client: PrefectClient, deployment: DeploymentResponse, automation: Automation, since: datetime
) -> list[FlowRun]:
    newest = FlowRunSort.EXPECTED_START_TIME_DESC
    ours = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
    runs = await client.read_flow_runs(deployment_filter=ours, sort=newest, limit=50)
    return [
        run for run in runs if run.created and run.created >= since and run.created_by and run.created_by.id == automation.id
    ]


async def _all_ended(client: PrefectClient, deployment: DeploymentResponse, automation: Automation, since: datetime) -> bool:
    runs = await _runs(client, deployment, automation, since)
    return bool(runs) and all(run.state is not None and run.state.is_final() for run in runs)


def main() -> int:
    """`python -m flows.smoke`: findings as JSON on stdout; exit code 1 if the safety net does not hold."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    found = asyncio.run(findings())
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if all(it["ok"] for it in found) else 1


if __name__ == "__main__":
    sys.exit(main())
