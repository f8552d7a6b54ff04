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


async def report_progress(job: JobState, live: JobProgress | None) -> None:
    """Create or move the progress bar of `job`."""
    name = job.spec.job
    done = 100.0 * (live.iteration + 1) / job.spec.train_iters if live else 0.0
    told = f"{name}: iteration {live.iteration + 1}/{job.spec.train_iters}, loss {live.loss:.3f}" if live else f"{name} waits"
    if name not in _bars:
        _bars[name] = await _best_effort(acreate_progress_artifact(progress=done, key=f"progress-{name}", description=told))
    elif (bar := _bars[name]) is not None:
        await _best_effort(aupdate_progress_artifact(bar, progress=done, description=told))


async def report_check(rows: list[dict[str, object]]) -> None:
    """A table with the verdict about each node of a check, and why."""
    table = [{key: str(row[key]) for key in ("node", "verdict", "reason", "meetings")} for row in rows]
    await _best_effort(acreate_table_artifact(table=table, key="node-check", description="What a node check has found."))


async def _best_effort(call: Awaitable[T]) -> T | None:
    try:
        return await asyncio.wait_for(call, LIMIT_S)
    except Exception as error:  # noqa: BLE001 - whatever ails the console must not reach the recovery
        log.warning("Prefect did not take an artifact: %s", error)
        return None
