"""The part of the fold that follows jobs: submitted, measured, slowed down, ended."""

from dataclasses import replace

from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus
from unicron_lib.domain.events import (
    JobCancelled,
    JobFinished,
    JobSubmitted,
    LossSpiked,
    RebalanceDue,
    StragglerCleared,
    StragglerDetected,
    ThroughputMeasured,
)
from unicron_lib.domain.incidents import planned_change
from unicron_lib.domain.jobs import ENDED, JobState, JobStatus
from unicron_lib.domain.rank_done import RankDone


def job_submitted(state: ClusterState, event: JobSubmitted) -> ClusterState:
    """A job that has ended may be submitted anew under its name; its generations go on rising."""
    name = event.spec.job
    before = state.jobs.get(name)
    if before and before.status not in ENDED:
        return state
    job = JobState(spec=event.spec, submission=event.submission)
    if before:
        job = replace(job, generation=before.generation, begins_with=before.generation + 1)
        job = replace(job, assignment=before.assignment, pending=before.pending, left_on=before.left_on)
        if event.spec.load:  # it goes on where the batches were left out
            job = replace(job, skipped=before.skipped)
    return state.with_job(job).with_incident(planned_change(event, job=name))


def throughput_measured(state: ClusterState, event: ThroughputMeasured) -> ClusterState:
    """Planning knows the job's own figures from now on."""
    job = state.jobs.get(event.job)
    if job is None or job.submission != event.submission:
        return state
    if event.pool != job.measured_in:  # GPUs of another pool are other GPUs
        job = replace(job, measured={}, measured_by_shape={}, measured_in=event.pool)
    point = {event.num_gpus: event.flops}
    if not event.shape:
        return state.with_job(replace(job, measured={**job.measured, **point}))
    own = {**job.measured_by_shape.get(event.shape, {}), **point}
    return state.with_job(replace(job, measured_by_shape={**job.measured_by_shape, event.shape: own}))


def rebalance_due(state: ClusterState, event: RebalanceDue) -> ClusterState:
    """All pools are to be looked at."""
    return state.with_incident(planned_change(event))


def straggler_changed(state: ClusterState, event: StragglerDetected | StragglerCleared) -> ClusterState:
    """For people: a slow rank is named, nothing is done about it."""
    job = state.jobs.get(event.job)
    if job is None or job.generation != event.generation:
        return state
    who = "job" if event.rank is None else f"rank {event.rank}"
    slow = {name: text for name, text in job.stragglers.items() if name != who}
    if isinstance(event, StragglerDetected):
        where = f" at {event.node}" if event.node else ""
        slow[who] = f"{event.ratio:.2f}x{where}: {event.reason}"
    return state.with_job(replace(job, stragglers=slow))


def loss_spiked(state: ClusterState, event: LossSpiked) -> ClusterState:
    """For people: nothing is done as long as it may pass."""
    job = state.jobs.get(event.job)
    if job is None or job.generation != event.generation:
        return state
    return state.with_job(replace(job, loss_spike="" if event.over else event.reason))


def rank_done(state: ClusterState, event: RankDone) -> ClusterState:
    """Remembered for as long as the generation lives; one that is over is of no interest."""
    job = state.jobs.get(event.job)
    if job is None or job.status in ENDED or event.generation != job.generation or event.generation < job.begins_with:
        return state
    done = {pair for pair in job.done_ranks if pair[0] == job.generation} | {(event.generation, event.rank)}
    return state.with_job(replace(job, done_ranks=tuple(sorted(done))))


def job_ended(state: ClusterState, event: JobFinished | JobCancelled) -> ClusterState:
    """Its GPUs are free; failures of it that are still open are of no interest any more."""
    job = state.jobs.get(event.job)
    if job is None or job.status in ENDED:
        return state
    if isinstance(event, JobCancelled):
        if event.submission != job.submission:
            return state
        job = replace(job, status=JobStatus.CANCELLED, reason="cancelled by a user")
    else:
        if event.generation != job.generation or event.generation < job.begins_with:
            return state
        job = replace(job, status=JobStatus.FINISHED, iteration=event.iteration, reason=_success(job))
    return _absorb_own_failures(state.with_job(job), planned_change(event, job=event.job))


def _success(job: JobState) -> str:
    return "its command has ended with exit code 0 on all ranks" if job.spec.command else "all iterations are done"


def _absorb_own_failures(state: ClusterState, incident: Incident) -> ClusterState:
    for part in state.open_incidents:
        if part.is_failure and part.jobs == incident.jobs and part.root and part.root.job:
            state = state.with_incident(replace(part, status=IncidentStatus.MERGED, merged_into=incident.id))
    return state.with_incident(incident)
