"""Every running job has a train run that watches it: where one died, a new one is started and adopts the job."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

import httpx
from prefect import State, get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId, FlowRunFilter, FlowRunFilterState
from prefect.client.schemas.filters import FlowRunFilterStateType as StateTypeFilter
from prefect.client.schemas.objects import StateType
from prefect.context import AsyncClientContext
from prefect.exceptions import PrefectException
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    get_current_settings,
    temporary_settings,
)
from prefect.states import Crashed

from tasks.services import services
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.jobs import ENDED, JobState
from unicron_lib.jobfile import job_spec

UNWATCHED_S = 20.0
"""A train run asks for the observations of its job at least every 10 s."""
START_S = 90.0
"""A train run that nobody has seen yet may still be starting."""
LOOK_S = 5.0
ANSWER_S = 2.0
"""A recovery waits no longer for an answer of Prefect's."""
THERE_S = 0.5
"""Who does not say within that time that it is there is not."""
log = logging.getLogger("unicron.watching")


@contextlib.asynccontextmanager
async def hardly_waiting() -> AsyncIterator[None]:
    """Within, Prefect is asked by one client, which stays connected, once and for `ANSWER_S` only.

    A client of its own for each question costs a recovery a fifth of a second, most of it for certificates. As Prefect makes
    them, they would ask a server that is locked, overloaded or silent six times, for minutes, which no recovery may take.
    """
    once = {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: ANSWER_S}
    with temporary_settings({**once, PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False}):  # it may be away just now
        async with AsyncClientContext.get_or_create() if _has_server() else contextlib.nullcontext():
            yield


async def prefect_answers() -> bool:
    """Whether the Prefect server is there; does not wait for one that is not."""
    if not _has_server():
        return False
    try:
        async with asyncio.timeout(THERE_S), get_client() as client:
            return await client.api_healthcheck() is None
    except TimeoutError:
        return False


def _has_server() -> bool:
    """Without one a client would start one."""
    return get_current_settings().api.url is not None


async def keep_watched() -> None:
    """Look every few seconds, for ever."""
    patience = Patience()
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await _look(patience)
        except Exception as error:  # noqa: BLE001 - a job trains on without its run
            log.warning("looking for train runs again later: %s", error)


@dataclass(slots=True)
class Patience:
    """Until when a job that nobody watches is left alone (monotonic), by name.

    The run of a submission that is new under an old name has never asked: it may still be starting.
    """

    until: dict[str, float] = field(default_factory=dict)
    submissions: dict[str, str] = field(default_factory=dict)
    starting: set[str] = field(default_factory=set)

    def note(self, name: str, submission: str) -> None:
        """Whose submission the name stands for."""
        if self.submissions.setdefault(name, submission) != submission:
            self.submissions[name] = submission
            self.starting.add(name)
            self.until.pop(name, None)

    def heard(self, name: str) -> None:
        """Its run has asked, or none is needed any more."""
        self.starting.discard(name)
        self.until.pop(name, None)

    def is_over(self, name: str, now: float, *, was_watched: bool) -> bool:
        """Whether it has been left alone for long enough."""
        lasts_s = UNWATCHED_S if was_watched and name not in self.starting else START_S
        return now > self.until.setdefault(name, now + lasts_s)


async def _look(patience: Patience) -> None:
    """Start a run for each job that nobody has watched for a while."""
    state: ClusterState = await asyncio.to_thread(services().journal.refresh)
    ages = await services().controller.watchers()
    now = time.monotonic()
    for name, job in state.jobs.items():
        patience.note(name, job.submission)
        if job.status in ENDED or ages.get(name, UNWATCHED_S) < UNWATCHED_S:
            patience.heard(name)
        elif patience.is_over(name, now, was_watched=name in ages) and await prefect_answers():
            try:
                await _start_another_run(name, job)
            except httpx.HTTPError as error:  # busy for a moment: the next look tries again
                log.warning("nothing watches %s yet: %s", name, error)
                continue
            except (ValueError, PrefectException) as error:
                log.warning("nothing watches %s: %s", name, error)
            patience.until[name] = now + START_S


async def _start_another_run(name: str, job: JobState) -> None:
    async with get_client() as client:
        submitted = await client.read_flow_run(UUID(job.submission))
        if submitted.deployment_id is None:
            log.warning("%s was not submitted through a deployment: nothing watches it", name)
            return
        await _bury(client, submitted.deployment_id)
        if await _is_awaited(client, submitted.deployment_id):
            log.warning("nothing watches %s until a worker takes up the run that waits for one", name)
            return
        parameters = {"job": job_spec.dump_python(job.spec, mode="json"), "submission": job.submission}
        run = await client.create_flow_run_from_deployment(submitted.deployment_id, parameters=parameters)
    log.warning("the train run of %s is gone: %s watches it from now on", name, run.name)


async def _is_awaited(client: PrefectClient, deployment: UUID) -> bool:
    """Whether a run is due and no worker has taken it up yet: more of them would all start together when one comes."""
    scheduled = FlowRunFilter(state=FlowRunFilterState(type=StateTypeFilter(any_=[StateType.SCHEDULED])))
    of_job = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    runs = await client.read_flow_runs(flow_run_filter=scheduled, deployment_filter=of_job)
    return any(run.expected_start_time is not None and run.expected_start_time <= datetime.now(UTC) for run in runs)


async def _bury(client: PrefectClient, deployment: UUID) -> None:
    """Runs that claim to be running while nothing of them is heard have crashed."""
    claimed = FlowRunFilter(state=FlowRunFilterState(type=StateTypeFilter(any_=[StateType.RUNNING, StateType.PENDING])))
    of_job = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    for run in await client.read_flow_runs(flow_run_filter=claimed, deployment_filter=of_job):
        crashed: State[None] = Crashed(message="nothing was heard of this run for a while: its process is gone")
        await client.set_flow_run_state(run.id, crashed, force=True)
