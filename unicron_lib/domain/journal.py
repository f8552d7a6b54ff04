"""The fold: how each event of the journal changes the state of the cluster."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

from unicron_lib.domain.carrying_out import plan_decided, recovery_completed, step_completed
from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, Node, NodeStatus
from unicron_lib.domain.events import (
    BreakerReset,
    Event,
    FailureDetected,
    FaultInjected,
    IncidentDismissed,
    JobCancelled,
    JobFinished,
    JobResumed,
    JobSubmitted,
    NodeCleared,
    NodeJoined,
    NodeNoted,
    NodeReleased,
    NodeSettled,
    NodeSuspected,
    PlanDecided,
    RebalanceDue,
    RecoveryCompleted,
    StepCompleted,
    StragglerCleared,
    StragglerDetected,
    ThroughputMeasured,
)
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.jobs import ENDED, JobState, JobStatus
from unicron_lib.domain.plans import content_id

FAULT_AGE_S = 300.0
"""An injected fault that nobody noticed for longer explains nothing."""


def incident_id(cause: str) -> str:
    """The id of the incident that a failure or a planned event with the id `cause` opens."""
    return content_id("inc", cause)


def fold(state: ClusterState, event: Event) -> ClusterState:
    """The state after `event`, the next entry of the journal. Raises IllegalTransition if it cannot follow."""
    return replace(FOLDS[type(event)](state, event), seq=state.seq + 1)


def fold_all(events: Iterable[Event], start: ClusterState | None = None) -> ClusterState:
    """The state after all `events`."""
    return reduce(fold, events, start or ClusterState())


# --- nodes -----------------------------------------------------------------------------------------------------------


def _node_joined(state: ClusterState, event: NodeJoined) -> ClusterState:
    before = state.nodes.get(event.node)
    if before and before.boot == event.boot:
        return state
    node = Node(
        id=event.node,
        boot=event.boot,
        address=event.address,
        num_gpus=event.num_gpus,
        since=event.at,
        rack=event.rack,
        pool=event.pool,
        gpu_model=event.gpu_model,
    )
    if before and before.status is NodeStatus.QUARANTINED:  # a new agent does not mend the hardware
        kept = replace(node, status=before.status, since=before.since, reason=before.reason)
        return state.with_node(kept)
    if before and before.status is not NodeStatus.LOST:
        state = _failure(state, _lost_unnoticed(before, event), event.at)
    state = state.with_node(node)
    return state.with_incident(_planned_change(event, node=event.node))


def _node_released(state: ClusterState, event: NodeReleased) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.QUARANTINED:
        return state
    ready = replace(node, status=NodeStatus.READY, since=event.at, reason="")
    return state.with_node(ready).with_incident(_planned_change(event, node=event.node))


def _lost_unnoticed(before: Node, event: NodeJoined) -> Failure:
    return Failure(
        id=f"{before.id}/{before.boot}/replaced",
        kind=ErrorKind.NODE_LOST,
        method=DetectionMethod.NODE_HEALTH,
        seen_at=event.at,
        node=before.id,
        boot=before.boot,
        evidence=f"the agent of {before.id} started anew before its old life counted as lost: all its ranks are gone",
    )


def _node_suspected(state: ClusterState, event: NodeSuspected) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or node.boot != event.boot or node.status is not NodeStatus.READY:
        return state
    return state.with_node(replace(node, status=NodeStatus.SUSPECT, since=event.at, reason=event.reason))


def _node_cleared(state: ClusterState, event: NodeCleared) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or node.boot != event.boot or node.status is not NodeStatus.SUSPECT:
        return state
    return state.with_node(replace(node, status=NodeStatus.READY, since=event.at, reason=""))


# --- failures --------------------------------------------------------------------------------------------------------


def _failure_detected(state: ClusterState, event: FailureDetected) -> ClusterState:
    return _failure(state, event.failure, event.at)


def _fault_injected(state: ClusterState, event: FaultInjected) -> ClusterState:
    return replace(state, faults={**state.faults, event.target: event.at})


def _failure(state: ClusterState, failure: Failure, at: float) -> ClusterState:
    if failure.job is None:
        return _node_failure(state, failure, at)
    job = state.jobs.get(failure.job)
    if job is None or job.status in ENDED or failure.generation != job.generation:
        return state
    incident = _open_incident_of(state, failure.job)
    state = state.with_job(_with_progress(job, failure, counts=incident is None))
    if incident is None:
        return _with_claimed_fault(state, _new_incident(failure, (failure.job,), at))
    joined = _reclassified(replace(incident, failures=(*incident.failures, failure)))
    if joined.root is failure:
        joined = replace(joined, updated_at=at)
    return _with_claimed_fault(state, joined)


def _node_failure(state: ClusterState, failure: Failure, at: float) -> ClusterState:
    node = state.nodes.get(failure.node or "")
    if node is None or node.boot != failure.boot or node.status in {NodeStatus.LOST, NodeStatus.QUARANTINED}:
        return state
    if failure.kind is ErrorKind.NODE_LOST:
        lost = replace(node, status=NodeStatus.LOST, since=at, reason=failure.evidence)
        state = state.with_node(lost)
    jobs = tuple(sorted(name for name, job in state.jobs.items() if node.id in job.nodes and job.status not in ENDED))
    return _absorb_echoes(state, _new_incident(failure, jobs, at))


def _absorb_echoes(state: ClusterState, incident: Incident) -> ClusterState:
    """A node's failure explains what its jobs have been complaining about: their open incidents become part of it."""
    of_jobs = (i for i in state.open_incidents if i.root is not None and i.root.job is not None)
    explained = [i for i in of_jobs if set(i.jobs) & set(incident.jobs)]
    for part in explained:
        state = state.with_incident(replace(part, status=IncidentStatus.MERGED, merged_into=incident.id))
    failures = (*incident.failures, *(failure for part in explained for failure in part.failures))
    opened_at = min((incident.opened_at, *(part.opened_at for part in explained)))
    jobs = tuple(sorted({*incident.jobs, *(job for part in explained for job in part.jobs)}))
    whole = _reclassified(replace(incident, failures=failures, jobs=jobs, opened_at=opened_at))
    return _with_claimed_fault(state, whole)


def _with_claimed_fault(state: ClusterState, incident: Incident) -> ClusterState:
    """The injected fault that explains an incident is the zero of its clock, and of no later one's."""
    named = {f"{f.job}/{f.rank}" if f.job else str(f.node) for f in incident.failures}
    fresh = {target: at for target, at in state.faults.items() if target in named and at >= incident.opened_at - FAULT_AGE_S}
    if incident.fault_at is None and fresh:
        target, at = max(fresh.items(), key=lambda item: item[1])
        state = replace(state, faults={name: when for name, when in state.faults.items() if name != target})
        incident = replace(incident, fault_at=at)
    return state.with_incident(incident)


def _new_incident(failure: Failure, jobs: tuple[str, ...], at: float) -> Incident:
    return Incident(
        id=incident_id(failure.id),
        kind=failure.kind,
        severity=failure.severity,
        opened_at=at,
        updated_at=at,
        failures=(failure,),
        jobs=jobs,
        node=failure.node,
    )


def _reclassified(incident: Incident) -> Incident:
    root = incident.root
    assert root is not None
    return replace(incident, kind=root.kind, severity=root.severity, node=root.node)


def _open_incident_of(state: ClusterState, job: str) -> Incident | None:
    return next((i for i in state.open_incidents if i.is_failure and job in i.jobs), None)


def _with_progress(job: JobState, failure: Failure, *, counts: bool) -> JobState:
    last = job.failed_at
    reached = last if failure.iteration is None else max(failure.iteration, -1 if last is None else last)
    if last is None or not counts:
        return replace(job, failed_at=-1 if reached is None else reached)
    progressed = failure.iteration is not None and failure.iteration > last
    return replace(job, failed_at=reached, stuck_restarts=0 if progressed else job.stuck_restarts + 1)


# --- jobs ------------------------------------------------------------------------------------------------------------


def _planned_change(
    event: NodeJoined | NodeReleased | JobSubmitted | JobFinished | JobCancelled | RebalanceDue,
    *,
    node: str | None = None,
    job: str | None = None,
) -> Incident:
    return Incident(
        id=incident_id(event.id),
        kind=event.type,
        severity=None,
        opened_at=event.at,
        updated_at=event.at,
        jobs=(job,) if job else (),
        node=node,
    )


def _job_submitted(state: ClusterState, event: JobSubmitted) -> ClusterState:
    name = event.spec.job
    before = state.jobs.get(name)
    if before and before.status not in ENDED:
        return state
    job = JobState(spec=event.spec, submission=event.submission)
    if before:
        job = replace(job, generation=before.generation, assignment=before.assignment, pending=before.pending)
    return state.with_job(job).with_incident(_planned_change(event, job=name))


def _throughput_measured(state: ClusterState, event: ThroughputMeasured) -> ClusterState:
    job = state.jobs.get(event.job)
    if job is None or job.submission != event.submission:
        return state
    known = job.measured if event.pool == job.measured_in else {}  # GPUs of another pool are other GPUs
    return state.with_job(replace(job, measured={**known, event.num_gpus: event.flops}, measured_in=event.pool))


def _job_ended(state: ClusterState, event: JobFinished | JobCancelled) -> ClusterState:
    job = state.jobs.get(event.job)
    if job is None or job.status in ENDED:
        return state
    if isinstance(event, JobCancelled):
        if event.submission != job.submission:
            return state
        job = replace(job, status=JobStatus.CANCELLED, reason="cancelled by a user")
    else:
        if event.generation != job.generation:
            return state
        job = replace(job, status=JobStatus.FINISHED, iteration=event.iteration, reason="all iterations are done")
    return _absorb_own_failures(state.with_job(job), _planned_change(event, job=event.job))


def _absorb_own_failures(state: ClusterState, incident: Incident) -> ClusterState:
    for part in state.open_incidents:
        if part.is_failure and part.jobs == incident.jobs:
            state = state.with_incident(replace(part, status=IncidentStatus.MERGED, merged_into=incident.id))
    return state.with_incident(incident)


def _rebalance_due(state: ClusterState, event: RebalanceDue) -> ClusterState:
    return state.with_incident(_planned_change(event))


def _unchanged(state: ClusterState, _: Event) -> ClusterState:
    return state


FOLDS: Mapping[type[Event], Callable[[ClusterState, Any], ClusterState]] = MappingProxyType(
    {
        NodeJoined: _node_joined,
        NodeSuspected: _node_suspected,
        NodeCleared: _node_cleared,
        NodeReleased: _node_released,
        NodeSettled: _unchanged,
        NodeNoted: _unchanged,
        JobResumed: _unchanged,
        StragglerDetected: _unchanged,
        StragglerCleared: _unchanged,
        IncidentDismissed: _unchanged,
        BreakerReset: _unchanged,
        FailureDetected: _failure_detected,
        FaultInjected: _fault_injected,
        JobSubmitted: _job_submitted,
        ThroughputMeasured: _throughput_measured,
        RebalanceDue: _rebalance_due,
        JobFinished: _job_ended,
        JobCancelled: _job_ended,
        PlanDecided: plan_decided,
        StepCompleted: step_completed,
        RecoveryCompleted: recovery_completed,
    }
)
"""What each event does to the state; a test holds it against the union of all events."""
