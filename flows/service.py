"""The warm recovery service: starts `recover` and `reconfigure` runs in-process, within a fraction of a second.

It wakes when the controller hears that something was journalled, and on Prefect's events, and looks into the journal every
second anyway, since events get lost. It holds no truth: killed and started again, it finds in the journal what is open and how
far it got. What it does it does at once, by plain functions, which a flow run shows; with Prefect out of reach it is recorded
when Prefect is back.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import httpx
from prefect import Flow, State, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events import Event
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.exceptions import ObjectNotFound, PrefectSignal
from prefect.flow_engine import run_flow_async
from prefect.states import Completed

from flows.acts import Overhearing
from flows.burials import keep_buried
from flows.diagnosing import keep_diagnosed
from flows.foresight import keep_foreseeing, keep_rebalancing
from flows.reconfiguration import reconfigure
from flows.recording import Work, shown_by_a_run
from flows.recovery import recover
from flows.response import is_over, respond
from flows.unasked_checks import keep_checked, keep_launches_checked
from flows.watching import hardly_waiting, keep_watched, prefect_answers
from tasks.health import report
from tasks.services import services
from unicron_lib.domain.actions import Action, Continue, Dismiss, Respond, Rest, TripBreaker, Wait
from unicron_lib.domain.cluster import ClusterState, Incident
from unicron_lib.domain.recovery import decide
from unicron_lib.errors import ControllerError, UnicronError, UserError
from unicron_lib.report import headline, incident_markdown

T = TypeVar("T")
POLL_S = 1.0
BUSY_S = (0.05, 0.1, 0.2, 0.4)
ORPHAN_AGE_S = 1.5
CONTROLLER_WAIT_S = 30.0
SHOW_AFTER_S = 1.0
"""A run takes work to make: a short recovery has the processors to itself."""
ACTION_FAILED = "prefect.automation.action.failed"
log = logging.getLogger("unicron.recovery")


class RecoveryService:
    """One process that sees to it that nothing stays open.

    Each incident that it answers has a task of its own, which works until the incident is over. Another one tells Prefect about
    it, at leisure: neither the recovery nor the next incident waits for that.
    """

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex[:8]
        self._wake = asyncio.Event()
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._shows: set[asyncio.Task[None]] = set()
        self._attempts: Counter[str] = Counter()
        self._unrecorded: list[str] = []

    async def serve(self) -> None:
        """Serve until cancelled."""
        async with hardly_waiting():
            await self._serve()

    async def _serve(self) -> None:
        own = (self._listen, self._hear_controller, self._adopt_orphans, self._record_late)
        watched = (keep_watched, keep_buried, keep_diagnosed, keep_checked, keep_launches_checked)
        beside = (*watched, keep_foreseeing, keep_rebalancing)
        background = [asyncio.create_task(work(), name=work.__name__) for work in (*own, *beside)]
        for task in background:
            task.add_done_callback(_tell_end)
        try:
            while True:
                pause_s = await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):  # wait_for would lose a cancellation that comes with the event
                        await self._wake.wait()
        finally:
            tasks = [*background, *self._answers.values(), *self._shows]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> float:
        """See to it that what is open is being answered; after how many seconds to look again at the latest."""
        self._wake.clear()
        try:
            state = await asyncio.to_thread(services().journal.refresh)
            action = decide(state, time.time(), services().policy)
        except UnicronError as error:
            log.warning("%s", error)
            return POLL_S
        except Exception:  # a service that sees to it that nothing stays open must not end
            log.exception("looking again in %.0f s", POLL_S)
            return POLL_S
        if isinstance(action, Wait):
            return min(max(action.until - time.time(), 0.01), POLL_S)
        incidents = _incidents_of(state, action)
        # whoever answers an incident that is not over does whatever is to be done
        at_work = any(not is_over(state, incident) for incident in self._answers)
        if incidents and not at_work and not set(incidents) & set(self._answers):
            self._answer(state.incidents[incidents[0]])
        return POLL_S

    def _answer(self, first: Incident) -> None:
        log.info("%s %s (%s)", first.kind, headline(first), first.id)
        answer = self._answers[first.id] = asyncio.create_task(self._handle(first))
        answer.add_done_callback(lambda _: self._answered(first.id))

    def _answered(self, incident: str) -> None:
        answer = self._answers.pop(incident)
        if answer.cancelled():
            return
        if error := answer.exception():
            log.error("the answer to %s broke off, looking again in %.0f s", incident, POLL_S, exc_info=error)
        else:
            self._wake.set()

    async def _handle(self, incident: Incident) -> None:
        """Answer it at once; a flow run shows that as soon as Prefect has made one."""
        self._attempts[incident.id] += 1
        work = Work()
        task = asyncio.create_task(self._show(incident, work, self._attempts[incident.id]))
        self._shows.add(task)
        task.add_done_callback(self._shows.discard)
        with work:
            await respond(work.call, incident=incident.id)

    async def _show(self, incident: Incident, work: Work, attempt: int) -> None:
        await work.over(SHOW_AFTER_S)
        try:
            run = await unless_busy(partial(self._new_run, incident, attempt))
            if run is not None:
                with shown_by_a_run(work):
                    await run_flow_async(_flow_of(incident), flow_run=run, parameters={"incident": incident.id})
                return
        except (Exception, PrefectSignal):  # whatever Prefect's trouble is, the recovery goes on without it
            log.exception("the flow run of %s broke off", incident.id)
        await work.over()
        if not work.has_failed and incident.id not in self._unrecorded:
            self._unrecorded.append(incident.id)

    async def _new_run(self, incident: Incident, attempt: int) -> FlowRun | None:
        """A run of the deployment that no worker races for, one an attempt; None while Prefect or the deployment is away."""
        if not await prefect_answers():
            return None
        flow = _flow_of(incident)
        async with get_client() as client:
            try:
                deployment = await client.read_deployment_by_name(f"{flow.name}/{flow.name}")
            except ObjectNotFound:
                return None
            wanted = {
                "name": f"{incident.kind} {headline(incident)} ({incident.id})",
                "parameters": {"incident": incident.id},
                "state": {"type": StateType.PENDING.value},
                "idempotency_key": f"{incident.id}/{self._life}/{attempt}",
                "tags": [incident.kind, *incident.jobs],
            }
            return await _created(client, f"/deployments/{deployment.id}/create_flow_run", wanted)

    async def _record_late(self) -> None:
        """Show in the UI, afterwards, what was healed while Prefect was away."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                while self._unrecorded and await self._record(self._unrecorded[0]):
                    self._unrecorded.pop(0)
            except Exception as error:  # noqa: BLE001 - nothing depends on it
                log.warning("recording %s later: %s", self._unrecorded[0], error)

    async def _record(self, name: str) -> bool:
        state = await asyncio.to_thread(services().journal.refresh)
        run = await self._new_run(state.incidents[name], self._attempts[name])
        if run is None:
            return False
        told: State[None] = Completed(message=incident_markdown(state, name)[:4000])
        async with get_client() as client:
            await client.set_flow_run_state(run.id, told, force=True)
        return True

    async def _listen(self) -> None:
        """Wake on every event of ours; log those that tell of an automation, our safety net, that could not act."""
        wanted = EventFilter(event=EventNameFilter(prefix=["unicron.", ACTION_FAILED]))
        while True:
            try:
                async with get_events_subscriber(filter=wanted) as events:
                    async for event in events:
                        self._hear(event)
            except Exception as error:  # noqa: BLE001 - the poll covers for it
                log.debug("no event stream: %s", error)
            await asyncio.sleep(POLL_S)

    async def _hear_controller(self) -> None:
        """Wake when observations have been journalled: sooner than by Prefect's events, and without Prefect."""
        told = -1
        while True:
            try:
                told = await services().controller.acknowledged(told, wait_s=CONTROLLER_WAIT_S)
                self._wake.set()
            except ControllerError:
                await asyncio.sleep(POLL_S)

    def _hear(self, event: Event) -> None:
        if event.event == ACTION_FAILED:
            name = event.resource.name or event.resource.id
            log.warning("the Prefect automation %s could not act: %s", name, event.payload.get("reason", event.payload))
        else:
            self._wake.set()

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


def _tell_end(task: asyncio.Task[None]) -> None:
    """What works beside the recoveries should do so for ever."""
    if not task.cancelled() and (error := task.exception()):
        log.error("%s has ended", task.get_name(), exc_info=error)


def _incidents_of(state: ClusterState, action: Action) -> tuple[str, ...]:
    """The incidents for whose sake something has to be done; empty if nothing has."""
    match action:
        case Respond():
            return action.incidents
        case Continue():
            return state.plans[action.plan].plan.incidents
        case Dismiss():
            return (action.incident,)
        case TripBreaker():
            return tuple(incident.id for incident in state.open_incidents if incident.is_failure)
        case Rest() | Wait():
            return ()


async def _created(client: PrefectClient, path: str, wanted: Mapping[str, object]) -> FlowRun:
    """A new flow run, by the client's connection but without its patience: it sleeps for 2 s after an answer of 503."""
    connection = client._client  # noqa: SLF001 - all else goes through that patience
    response = await httpx.AsyncClient.send(connection, connection.build_request("POST", path, json=wanted))
    response.raise_for_status()
    return FlowRun.model_validate(response.json())


async def unless_busy(call: Callable[[], Awaitable[T]]) -> T:
    """What `call` gives. A server that answers 503, as SQLite's does when two write at once, is asked again for a moment."""
    for pause_s in BUSY_S:
        try:
            return await call()
        except httpx.HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            await asyncio.sleep(pause_s)
    return await call()


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
    for ours in map(logging.getLogger, ("unicron", "unicron_lib")):  # Prefect has set up the root logger, for warnings
        ours.setLevel(os.environ.get("UNICRON_LOG_LEVEL", "INFO"))
        ours.addHandler(Overhearing())
    try:
        asyncio.run(_main())
    except UserError as error:
        sys.stderr.write(f"unicron recovery: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
