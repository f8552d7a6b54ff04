"""`train`: the long-lived run of one job. It watches the job's health; the training itself does not depend on it."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable

from prefect import State, flow, get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled

from flows.acts import Act
from flows.outliving import outlive_the_reader
from tasks.checkpoints import CheckpointWatch
from tasks.health import publish, report_task
from tasks.reporting import report_progress
from tasks.services import services
from unicron_lib.detection.loss_guard import LossGuard, loss_events
from unicron_lib.detection.measured import measurements
from unicron_lib.detection.straggler import StragglerWatch, straggler_events
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import Event, JobCancelled, submitted
from unicron_lib.domain.jobs import ENDED, JobSpec, JobState, JobStatus
from unicron_lib.errors import StoreError, UnicronError, UserError

LOOK_S = 0.5
MOST_UNSHOWN = 256
"""In a flood the run's page lacks the oldest reports; its log and the journal have all."""


class JobFailed(UnicronError):
    """The job was stopped for a reason that no restart cures."""


@flow(name="train", flow_run_name="train {job.job}", description="One training job, from its submission to its end.")
async def train(job: JobSpec, submission: str = "") -> str | State[None]:
    """Submit `job` (or adopt it if it already runs), watch its health, and return how it ended.

    With `submission` it takes the place of that one's run, which died: it watches and never submits.
    Raises UserError if another job has the name, JobFailed if the job was stopped.
    """
    outlive_the_reader()
    if not submission:
        submission = await _submit(job, submission=str(flow_run.id or f"local-{time.time_ns()}"))
    guards = (_watch_loss,) if job.guards_loss else ()
    watches = (_watch_ranks, _watch_stragglers, _watch_progress, _watch_checkpoints, *guards)
    watchers = [asyncio.create_task(watch(job.job)) for watch in watches]
    try:
        ended = await _wait_for_end(job.job, submission)
    except asyncio.CancelledError:
        await _cancel_if_asked(job.job)
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    if ended.status is JobStatus.FAILED:
        raise JobFailed(ended.reason)
    told = f"{ended.status}: {ended.reason}"
    return Cancelled(message=told) if ended.status is JobStatus.CANCELLED else told


async def _refresh() -> ClusterState:
    return await asyncio.to_thread(services().journal.refresh)


async def _submit(job: JobSpec, submission: str) -> str:
    """Journal the job under `submission` unless that is done or the same job runs; the submission to watch."""
    present = (await _refresh()).jobs.get(job.job)
    if present is None or (present.status in ENDED and present.submission != submission):
        await publish(submitted(job, submission=submission, at=time.time()))
        present = (await _refresh()).jobs[job.job]
    if present.submission != submission and present.spec != job:
        raise UserError(f"the name {job.job} is taken by a job that is {present.status}: cancel it or choose another name")
    return present.submission


async def _wait_for_end(name: str, submission: str) -> JobState:
    """The job's last state, or that of a newer submission once there is one."""
    while True:
        with contextlib.suppress(StoreError):  # the store may be away for a while, the job trains on
            job = (await _refresh()).jobs[name]
            if job.status in ENDED or job.submission != submission:
                return job
        await asyncio.sleep(LOOK_S)


async def _cancel_if_asked(name: str) -> None:
    """A cancelled run cancels its job; a run that merely loses its worker does not."""
    from prefect import get_client

    async with get_client() as client:
        run = await client.read_flow_run(flow_run.id)
    if run.state is not None and run.state.is_cancelling():
        job = (await _refresh()).jobs[name]
        await publish(
            JobCancelled(id=f"cancelled/{name}/{job.submission}", at=time.time(), job=name, submission=job.submission)
        )


async def _for_ever(look: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Keep looking: what a part of the control plane that is away for a while must not end."""
    while True:
        try:
            await look()
        except UnicronError as error:
            get_run_logger().warning("%s", error)
            await asyncio.sleep(LOOK_S)
        except Exception:  # noqa: BLE001 - a watcher that ends in silence would be worse
            get_run_logger().exception("this look failed, another one follows")
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(pause_s)


async def _watch_ranks(name: str) -> None:
    """Node, process and exception health: what agents and controller observed of this job. It is journalled, then shown."""
    reported = deque[Act](maxlen=MOST_UNSHOWN)
    showing = asyncio.create_task(_show_reports(reported))

    async def look() -> None:
        for observation in await services().controller.observations(job=name, wait_s=10.0):
            report = Act(task=report_task, args=(observation,))
            incident = await report.do()
            get_run_logger().warning("%s at %s: incident %s", observation.body.type, observation.node, incident)
            reported.append(report)

    try:
        await _for_ever(look, pause_s=0.0)
    finally:
        showing.cancel()


async def _show_reports(reported: deque[Act]) -> None:
    """One after the other: what is to be journalled goes first."""
    while True:
        while reported:
            await reported.popleft().show_if_possible()
        await asyncio.sleep(LOOK_S / 4)


async def _watch_stragglers(name: str) -> None:
    """Iteration-time health: which rank slows the job down, or is the job as a whole slower than it was."""
    watch: StragglerWatch | None = None

    async def look() -> None:
        nonlocal watch
        live = (await services().live()).get(name)
        if live is None or live.window is None:
            return
        if watch is None:
            watch = StragglerWatch()
            watch.recall((await _refresh()).jobs[name])
        generation, window = live.generation, live.window
        found = watch.look(generation, window)
        for event in straggler_events(found, window, job=name, generation=generation, nodes=live.nodes, now=time.time()):
            get_run_logger().warning("%s: rank %s", event.type, event.rank)
            await publish(event)

    await _for_ever(look, pause_s=1.0)


async def _watch_loss(name: str) -> None:
    """Loss health: a spike is told, and answered if it does not pass by itself."""
    guard: LossGuard | None = None
    untold = deque[Event]()

    async def look() -> None:
        nonlocal guard
        live = (await services().live()).get(name)
        if live is None:
            return
        if guard is None:
            guard = LossGuard(patience_iters=(await _refresh()).jobs[name].spec.loss_spike_patience_iters)
        found = guard.look(live.generation, live.curve)
        untold.extend(loss_events(found, job=name, generation=live.generation, now=time.time()))
        while untold:  # the guard says it once: it must not get lost while the store is away
            get_run_logger().warning("%s of %s", untold[0].type, name)
            await publish(untold[0])
            untold.popleft()

    await _for_ever(look, pause_s=1.0)


async def _watch_progress(name: str) -> None:
    """A progress bar on the run's page, and what the job turned out to achieve into the journal."""

    async def look() -> None:
        live = (await services().live()).get(name)
        state = await _refresh()
        job = state.jobs[name]
        await report_progress(job, live)
        if live is None:
            return
        pool, seen = state.pool_of(job), live.measured_flops
        for event in measurements(job, seen, time.time(), generation=live.generation, pool=pool):
            await asyncio.to_thread(services().journal.append, event)

    await _for_ever(look, pause_s=5.0)


async def _watch_checkpoints(name: str) -> None:
    """Checkpoint health: what is saved, on the run's page, and an alarm when the newest becomes too old."""
    watch: CheckpointWatch | None = None

    async def look() -> None:
        nonlocal watch
        if watch is None:
            watch = CheckpointWatch((await _refresh()).jobs[name].spec)
        await watch.look((await services().live()).get(name))

    await _for_ever(look, pause_s=10.0)
