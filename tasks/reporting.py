"""What the Prefect UI shows beside the runs: incident reports and progress bars. Losing one loses nothing else."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.context import FlowRunContext

from unicron_lib.controller.views import JobProgress
from unicron_lib.domain.cluster import ClusterState, PlanState
from unicron_lib.domain.jobs import JobState
from unicron_lib.report import incident_markdown

LIMIT_S = 5.0
log = logging.getLogger("unicron.reporting")
_bars: dict[str, UUID | None] = {}
T = TypeVar("T")


async def report_recovery(state: ClusterState, plan: PlanState) -> None:
    """A markdown artifact for each incident of `plan`: what happened, what was decided and why."""
    if FlowRunContext.get() is None:
        return
    for name in plan.plan.incidents:
        markdown = incident_markdown(state, name)
        await _best_effort(acreate_markdown_artifact(markdown=markdown, key=name, description=plan.plan.reason[:500]))


async def report_diagnosis(state: ClusterState, name: str) -> None:
    """The incident's artifact once more, now with why it happened; attached to the run that healed it, if there is one."""
    told = state.incidents[name].diagnosis
    assert told is not None
    await _best_effort(_add_artifact(incident_markdown(state, name), key=name, description=f"{told.kind}: {told.root_cause}"))


async def _add_artifact(markdown: str, *, key: str, description: str) -> None:
    of_incident = FlowRunFilter(name=FlowRunFilterName(like_=f"({key})"))
    async with get_client() as client:
        runs = await client.read_flow_runs(flow_run_filter=of_incident, limit=1)
        request = ArtifactCreate(
            type="markdown",
            key=key,
            description=description[:500],
            data=markdown,
            flow_run_id=runs[0].id if runs else None,
        )
        await client.create_artifact(artifact=request)


async def report_progress(job: JobState, live: JobProgress | None) -> None:
    """Create or move the progress bar of `job`."""
    name = job.spec.job
    whole = None if job.spec.command else job.spec.train_iters  # only a command itself knows how much it has to do
    done = 100.0 * (live.iteration + 1) / whole if live and whole else 0.0
    count = f"{live.iteration + 1}" + (f"/{whole}" if whole else "") if live else ""
    told = f"{name}: iteration {count}, loss {live.loss:.3f}" if live else f"{name} waits"
    if name not in _bars:
        _bars[name] = await _best_effort(acreate_progress_artifact(progress=done, key=f"progress-{name}", description=told))
    elif (bar := _bars[name]) is not None:
        await _best_effort(aupdate_progress_artifact(bar, progress=done, description=told))


async def report_checkpoints(job: str, rows: list[dict[str, str]], told: str) -> None:
    """A table of the checkpoints of `job`: a new version of it whenever one is committed or goes."""
    await _best_effort(acreate_table_artifact(table=rows, key=f"checkpoints-{job}", description=told[:500]))


async def report_check(rows: list[dict[str, object]]) -> None:
    """A table with the verdict about each node of a check, and why."""
    table = [{key: str(row[key]) for key in ("node", "verdict", "reason", "meetings")} for row in rows]
    await _best_effort(acreate_table_artifact(table=table, key="node-check", description="What a node check has found."))


async def _best_effort(call: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await call
    except Exception as error:  # noqa: BLE001 - whatever ails the console must not reach the recovery
        log.warning("Prefect did not take an artifact: %s", error)
        return None
