"""The warm recovery service: starts `recover` and `reconfigure` runs in-process, within a fraction of a second.

It wakes on Prefect's events and looks into the journal every second anyway, since events get lost. It holds no truth:
killed and started again, it finds in the journal what is open and how far it got. With Prefect out of reach the same
sequence runs as plain functions and is recorded when Prefect is back.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from prefect import Flow, State, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow_async
from prefect.states import Completed, Pending

from flows.reconfiguration import reconfigure
from flows.recovery import recover
from flows.response import plain, respond
from flows.watching import keep_watched, prefect_answers
from tasks.health import report
from tasks.services import services
from unicron_lib.domain.actions import Continue, Respond
from unicron_lib.domain.cluster import ClusterState, Incident
from unicron_lib.domain.recovery import decide
from unicron_lib.errors import ControllerError, UnicronError, UserError
from unicron_lib.report import headline, incident_markdown

POLL_S = 1.0
ORPHAN_AGE_S = 1.5
log = logging.getLogger("unicron.recovery")


class RecoveryService:
    """One process that sees to it that nothing stays open."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex[:8]
        self._wake = asyncio.Event()
        self._unrecorded: list[str] = []

    async def serve(self) -> None:
        """Serve until cancelled."""
        background = [asyncio.create_task(work()) for work in (self._listen, self._adopt_orphans, keep_watched)]
        try:
            while True:
                await self._look()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def _look(self) -> None:
        self._wake.clear()
        try:
            state = await asyncio.to_thread(services().journal.refresh)
            action = decide(state, time.time())
            if isinstance(action, Continue | Respond):
                await self._handle(state, action)
                return
            await self._record_late(state)
        except UnicronError as error:
            log.warning("%s", error)
        except Exception:  # a service that sees to it that nothing stays open must not end
            log.exception("looking again in %.0f s", POLL_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), POLL_S)

    async def _handle(self, state: ClusterState, action: Continue | Respond) -> None:
        incidents = action.incidents if isinstance(action, Respond) else state.plans[action.plan].plan.incidents
        first = state.incidents[incidents[0]]
        log.info("%s %s (%s)", first.kind, headline(first), first.id)
        try:
            run = await self._new_run(first)
            if run is not None:
                await run_flow_async(_flow_of(first), flow_run=run, parameters={"incident": first.id})
                return
        except Exception:  # whatever Prefect's trouble is, the recovery goes on without it
            log.exception("the flow run of %s broke off; going on without Prefect", first.id)
        await respond(plain, incident=first.id)
        self._unrecorded.append(first.id)

    async def _new_run(self, incident: Incident) -> FlowRun | None:
        """A run of the deployment that no worker races for; None while Prefect or the deployment is away."""
        if not await prefect_answers():
            return None
        flow = _flow_of(incident)
        async with get_client() as client:
            try:
                deployment = await client.read_deployment_by_name(f"{flow.name}/{flow.name}")
            except ObjectNotFound:
                return None
            return await client.create_flow_run_from_deployment(
                deployment.id,
                name=f"{incident.kind} {headline(incident)} ({incident.id})",
                parameters={"incident": incident.id},
                state=Pending(),
                idempotency_key=f"{incident.id}/{self._life}",
                tags=[incident.kind, *incident.jobs],
            )

    async def _record_late(self, state: ClusterState) -> None:
        """Show in the UI, afterwards, what was healed while Prefect was away."""
        while self._unrecorded:
            incident = state.incidents[self._unrecorded[0]]
            run = await self._new_run(incident)
            if run is None:
                return
            told: State[None] = Completed(message=incident_markdown(state, incident.id)[:4000])
            async with get_client() as client:
                await client.set_flow_run_state(run.id, told, force=True)
            self._unrecorded.pop(0)

    async def _listen(self) -> None:
        """Wake on every event about an incident."""
        wanted = EventFilter(event=EventNameFilter(prefix=["unicron."]))
        while True:
            try:
                async with get_events_subscriber(filter=wanted) as events:
                    async for _ in events:
                        self._wake.set()
            except Exception as error:  # noqa: BLE001 - the poll covers for it
                log.debug("no event stream: %s", error)
            await asyncio.sleep(POLL_S)

    async def _adopt_orphans(self) -> None:
        """Journal observations that no train flow picked up in time: idle nodes, or a flow that died."""
        while True:
            try:
                for observation in await services().controller.observations(wait_s=POLL_S, min_age_s=ORPHAN_AGE_S):
                    await report(observation)
                    self._wake.set()
            except ControllerError:
                await asyncio.sleep(POLL_S / 4)
            except UnicronError as error:
                log.warning("%s", error)
                await asyncio.sleep(POLL_S)


def _flow_of(incident: Incident) -> Flow[[str], Coroutine[Any, Any, str]]:
    return recover if incident.is_failure else reconfigure


async def _main() -> None:
    import unicron_lib.planning.milp as solver

    await asyncio.to_thread(solver.warm_up)
    await asyncio.to_thread(services().journal.refresh)
    service = asyncio.create_task(RecoveryService().serve())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.cancel)
    log.info("ready")
    with contextlib.suppress(asyncio.CancelledError):
        await service


def main() -> int:
    """`python -m flows.service`: serve until SIGTERM; exit code 2 for a wrong configuration."""
    logging.basicConfig(level=os.environ.get("UNICRON_LOG_LEVEL", "INFO"), format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(_main())
    except UserError as error:
        sys.stderr.write(f"unicron recovery: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
