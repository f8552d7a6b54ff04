"""The one sequence that answers incidents: decide, plan, carry out, complete.

The flows run it through Prefect tasks; with Prefect out of reach the same sequence runs as plain functions.
"""

import asyncio
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol

from prefect import Task

from tasks.events import CLOSED, emit_incident
from tasks.health import report_failure
from tasks.planning import complete, decide_plan, dismiss, trip_breaker
from tasks.reporting import report_recovery
from tasks.sending import StepFailed
from tasks.services import services
from tasks.transition import carry_out
from unicron_lib.domain.actions import Continue, Dismiss, Respond, Rest, TripBreaker, Wait
from unicron_lib.domain.cluster import ClusterState, IncidentStatus, PlanState
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.plans import STAGES, Step, StepKind
from unicron_lib.domain.recovery import decide
from unicron_lib.errors import IllegalTransition, StoreError, UserError

LOOK_AGAIN_S = 0.25


class Call(Protocol):
    """How a task's function is called."""

    async def __call__(self, task: Task[Any, Coroutine[Any, Any, Any]], *args: object) -> Any:
        """Call it with `args`."""
        ...


async def as_task(task: Task[Any, Coroutine[Any, Any, Any]], *args: object) -> Any:
    """As a task run that the UI shows."""
    return await task(*args)


async def plain(task: Task[Any, Coroutine[Any, Any, Any]], *args: object) -> Any:
    """As the function that it is, without Prefect."""
    return await task.fn(*args)


async def respond(call: Call, *, incident: str | None = None) -> None:
    """Work until `incident` is over, or with None until nothing is open."""
    while True:
        state = await _refresh()
        if incident is not None and is_over(state, incident):
            return
        match decide(state, time.time(), services().policy):
            case Rest():
                return
            case Wait(until=until):
                await asyncio.sleep(min(max(until - time.time(), 0.01), LOOK_AGAIN_S))
            case Continue() | Respond() | Dismiss() | TripBreaker() as action:
                await _act(call, state, action)


def is_over(state: ClusterState, incident: str) -> bool:
    """Whether nothing is left to be done about it."""
    found = state.incidents.get(incident)
    return found is None or found.status in {IncidentStatus.CLOSED, IncidentStatus.MERGED}


async def _refresh() -> ClusterState:
    return await asyncio.to_thread(services().journal.refresh)


async def _act(call: Call, state: ClusterState, action: Continue | Respond | Dismiss | TripBreaker) -> None:
    try:
        match action:
            case Respond():
                await call(decide_plan, action)
            case Dismiss():
                await call(dismiss, action)
            case TripBreaker():
                await call(trip_breaker, action)
            case Continue():
                await _carry_out_plan(call, state.plans[action.plan])
    except IllegalTransition:
        await asyncio.sleep(LOOK_AGAIN_S)  # another process was faster: what it journalled holds


async def _carry_out_plan(call: Call, progress: PlanState) -> None:
    plan = progress.plan
    for stage in STAGES:
        todo = [step for step in plan.steps if step.kind in stage and step.id not in progress.results]
        if not todo:
            continue
        outcome = await _unless_superseded(plan.id, [call(carry_out, plan, step) for step in todo])
        if outcome is None:
            return
        undone = [(step, error) for step, error in zip(todo, outcome, strict=True) if isinstance(error, BaseException)]
        for step, error in undone:
            # what the store's absence or a cancellation left undone is merely carried out again
            if isinstance(error, Exception) and not isinstance(error, StoreError):
                await report_failure(_failure_of(await _refresh(), step, error))
        if undone:
            await asyncio.sleep(LOOK_AGAIN_S)
            return
    await call(complete, plan.id)
    state = await _refresh()
    for incident in state.incidents.values():
        if incident.id in plan.incidents or incident.merged_into in plan.incidents:
            await emit_incident(CLOSED, incident)
    await report_recovery(state, state.plans[plan.id])


async def _unless_superseded(plan: str, calls: list[Awaitable[object]]) -> list[object] | None:
    """The results (or exceptions) of `calls`; None, with them cancelled, as soon as something newer overrides the plan."""
    work = asyncio.gather(*calls, return_exceptions=True)
    while True:
        done, _ = await asyncio.wait({work}, timeout=LOOK_AGAIN_S)
        if done:
            return work.result()
        action = decide(await _refresh(), time.time(), services().policy)
        if not isinstance(action, Continue) or action.plan != plan:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return None


def _failure_of(state: ClusterState, step: Step, error: Exception) -> Failure:
    """A job's failure, or that of a node which cannot be made to let a job's ranks go."""
    name = error.node if isinstance(error, StepFailed) else None
    node = state.nodes.get(name or "")
    is_nodes = node is not None and step.kind in {StepKind.DRAIN, StepKind.STOP}
    return Failure(
        id=f"step/{step.id}",
        kind=ErrorKind.USER_ERROR if isinstance(error, UserError) else ErrorKind.OTHER,
        method=DetectionMethod.PROCESS,
        seen_at=time.time(),
        job=None if is_nodes else step.job,
        generation=step.generation,
        node=name,
        boot=node.boot if node else None,
        evidence=f"{step.kind} failed: {error}",
    )
