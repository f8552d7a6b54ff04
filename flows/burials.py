"""Answers that claim to be running in Prefect though what they answer is over: Prefect is told that their process is gone."""

import asyncio
import logging
import time

from prefect import State, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowRunFilter, FlowRunFilterState
from prefect.client.schemas.filters import FlowRunFilterStateType as StateTypeFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Crashed

from flows.reconfiguration import reconfigure
from flows.recovery import OPEN, recover
from flows.response import is_over
from flows.watching import prefect_answers
from tasks.services import services
from unicron_lib.domain.cluster import ClusterState

LEASE_S = 30.0
"""An answer that lives ends, and tells Prefect so, within moments of its incident's end."""
LOOK_S = 10.0
log = logging.getLogger("unicron.burials")


async def keep_buried() -> None:
    """Look every few seconds, for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            if await prefect_answers():
                await bury_dead_answers(time.time())
        except Exception as error:  # noqa: BLE001 - nothing depends on it
            log.warning("looking for runs that died again later: %s", error)


async def bury_dead_answers(now: float) -> None:
    """Tell Prefect of the runs of `recover` and `reconfigure` that have crashed; `now` is the wall clock."""
    claim = FlowRunFilter(state=FlowRunFilterState(type=StateTypeFilter(any_=[StateType.RUNNING, StateType.PENDING])))
    named = DeploymentFilter(name=DeploymentFilterName(any_=[recover.name, reconfigure.name]))
    async with get_client() as client:
        claiming = await client.read_flow_runs(flow_run_filter=claim, deployment_filter=named)
        if not claiming:
            return
        state = await asyncio.to_thread(services().journal.refresh)
        for run in claiming:
            if now - _idle_since(state, run, now) > LEASE_S:
                log.warning("%s has no process any more", run.name)
                crashed: State[None] = Crashed(message="its process is gone; what it was to answer is over")
                await client.set_flow_run_state(run.id, crashed, force=True)


def _idle_since(state: ClusterState, run: FlowRun, now: float) -> float:
    """Since when the run has had nothing to do; `now` if it has."""
    wanted = run.parameters.get("incident", OPEN)
    is_idle = not state.open_incidents if wanted == OPEN else is_over(state, wanted)
    if not is_idle:
        return now
    answered = state.incidents.values() if wanted == OPEN else [it for it in (state.incidents.get(wanted),) if it]
    claimed_at = run.state.timestamp.timestamp() if run.state else now
    return max([claimed_at, *(it.closed_at or it.updated_at for it in answered)])
