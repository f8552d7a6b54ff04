"""The part of the fold that correlates: which failures are one incident, and which incidents are over by themselves."""

from collections.abc import Iterable
from dataclasses import replace

from unicron_lib.domain.budget import failed, forgiven
from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, Node, NodeStatus
from unicron_lib.domain.diagnosed import IncidentDiagnosed
from unicron_lib.domain.events import FailureDetected, FaultInjected, IncidentDismissed, JobResumed
from unicron_lib.domain.failures import ErrorKind, Failure, Severity
from unicron_lib.domain.flapping import losses_until
from unicron_lib.domain.incidents import absorbed, joined, opened_by, with_claimed_fault, with_failures
from unicron_lib.domain.jobs import ENDED
from unicron_lib.errors import IllegalTransition

DEDUP_WINDOW_S = 180.0
"""What follows from an incident and is seen within this time after its end is counted with it (NVSentinel's default)."""


def failure_detected(state: ClusterState, event: FailureDetected) -> ClusterState:
    """It joins an incident, opens one, or is dropped if it tells of a generation or a life that is over."""
    return record(state, event.failure, event.at)


def fault_injected(state: ClusterState, event: FaultInjected) -> ClusterState:
    """Remembered until an incident claims it."""
    return replace(state, faults={**state.faults, event.target: event.at})


def record(state: ClusterState, failure: Failure, at: float) -> ClusterState:
    """The state with `failure`, journalled at `at`, in the one incident that it belongs to."""
    return _of_node(state, failure, at) if failure.job is None else _of_job(state, failure, failure.job, at)


def _of_job(state: ClusterState, failure: Failure, name: str, at: float) -> ClusterState:
    job = state.jobs.get(name)
    if job is None or job.status in ENDED or failure.generation != job.generation:
        return state
    if failure.rank is not None and job.generation < job.begins_with:  # a rank of an earlier submission
        return state
    own = [i for i in _open_failures(state) if name in i.jobs and not i.is_only_symptoms]
    incident = min(own, key=lambda i: i.node != failure.node, default=None)
    is_new = incident is None or (incident.severity is not Severity.SEV1 and all(f.job != name for f in incident.failures))
    state = state.with_job(failed(job, failure, counts=is_new))
    if incident:
        return with_claimed_fault(state, joined(incident, failure, at))
    parts = [i for i in state.incidents.values() if name in i.jobs and _explains_job(i, failure, at)]
    return with_claimed_fault(*absorbed(state, opened_by(failure, (name,), at), parts))


def _explains_job(incident: Incident, failure: Failure, at: float) -> bool:
    """Whether a node's incident, which called for nothing by itself, is about what now befalls a job."""
    if incident.status is IncidentStatus.OPEN:
        return incident.is_only_symptoms
    is_link = incident.kind == ErrorKind.LINK_FLAPPING and incident.is_of_nodes
    over = incident.status is IncidentStatus.CLOSED and incident.plan is None
    return is_link and over and failure.is_echo and _is_recent(incident, at)


def _of_node(state: ClusterState, failure: Failure, at: float) -> ClusterState:
    node = state.nodes.get(failure.node or "")
    if node is None or node.boot != failure.boot:
        return state
    jobs = state.jobs_on(node.id)
    if node.status in {NodeStatus.LOST, NodeStatus.QUARANTINED}:
        return _counted(state, (i for i in _failures(state) if i.node == node.id and _is_recent(i, at)))
    if failure.kind is ErrorKind.NODE_LOST and has_left_empty(state, node):
        reason = f"left as announced: {node.reason}"
        return state.with_node(replace(node, status=NodeStatus.LOST, since=at, reason=reason, has_left=True))
    if failure.kind is ErrorKind.NODE_LOST:
        losses = losses_until(node, at)
        lost = replace(node, status=NodeStatus.LOST, since=at, reason=failure.evidence, losses=losses)
        state = state.with_node(lost)
    whole = _joining(state, failure, jobs, at)
    if whole:
        return with_claimed_fault(state, whole)
    known = [i for i in _failures(state) if _is_recent(i, at) and _tells_again(state, i, failure, jobs)]
    if known:
        return _counted(state, known)
    return _cause(state, opened_by(failure, jobs, at))


def has_left_empty(state: ClusterState, node: Node) -> bool:
    """Whether the end of the node's life is what was announced, and takes nothing with it."""
    return node.status is NodeStatus.LEAVING and state.is_emptied(node.id)


def _joining(state: ClusterState, failure: Failure, jobs: tuple[str, ...], at: float) -> Incident | None:
    """The open incident that explains a node's failure, with it; None if there is none.

    What would be the root cause itself opens an incident of its own, so that a plan in the making is made anew.
    """
    near = [i for i in _open_failures(state) if i.node == failure.node or (failure.symptom and set(jobs) & set(i.jobs))]
    for incident in sorted(near, key=lambda i: i.node != failure.node):
        whole = joined(incident, failure, at)
        if failure.symptom or whole.root is not failure:
            return whole if failure.symptom else replace(whole, jobs=tuple(sorted({*incident.jobs, *jobs})))
    return None


def _tells_again(state: ClusterState, incident: Incident, failure: Failure, jobs: tuple[str, ...]) -> bool:
    """Whether a node's failure is one more trace of an incident that is being answered, or over."""
    if incident.status is IncidentStatus.OPEN:
        return False
    if failure.symptom:
        return incident.node == failure.node or bool(set(jobs) & set(incident.jobs))
    if incident.node != failure.node or incident.kind != failure.kind:
        return False
    if failure.boot not in {known.boot for known in incident.failures}:
        return False  # what happens to the next life of a node is news
    if incident.closed_at is None:
        return True
    held = incident.plan is None and (failure.severity is not Severity.SEV1 or state.breaker_since is not None)
    return held or failure.seen_at <= incident.closed_at


def _is_recent(incident: Incident, at: float) -> bool:
    return incident.closed_at is None or at - incident.closed_at <= DEDUP_WINDOW_S


def _counted(state: ClusterState, known: Iterable[Incident]) -> ClusterState:
    newest = max(known, key=lambda incident: (incident.opened_at, incident.id), default=None)
    return state.with_incident(replace(newest, count=newest.count + 1)) if newest else state


def _cause(state: ClusterState, incident: Incident) -> ClusterState:
    """A node's failure explains what its jobs have been complaining about: their open incidents become part of it."""
    parts = [part for part in _open_failures(state) if _is_explained(part, incident)]
    complaints = [part.root for part in parts if part.root]
    state, whole = absorbed(state, incident, parts)
    if whole.is_failure and whole.severity is Severity.SEV1 and whole.root and whole.root.job is None:
        for name in {root.job for root in complaints if root.job}:
            state = state.with_job(forgiven(state.jobs[name]))
    return with_claimed_fault(state, whole)


def _is_explained(part: Incident, cause: Incident) -> bool:
    root = part.root
    if root is None or (part.node != cause.node and not set(part.jobs) & set(cause.jobs)):
        return False
    if part.is_only_symptoms or part.node == cause.node:
        return not root.verdict or (root.verdict == "stop" and cause.severity is Severity.SEV1)
    return root.job is not None and part.severity is not Severity.SEV1


def _open_failures(state: ClusterState) -> list[Incident]:
    return [incident for incident in state.open_incidents if incident.is_failure]


def _failures(state: ClusterState) -> Iterable[Incident]:
    return (i for i in state.incidents.values() if i.is_failure and i.status is not IncidentStatus.MERGED)


def job_resumed(state: ClusterState, event: JobResumed) -> ClusterState:
    """A hang is over: its incident, if nothing was decided yet, is closed as soon as no rank of it still stands."""
    job = state.jobs.get(event.job)
    if job is None or job.generation != event.generation:
        return state
    for incident in _open_failures(state):
        if event.job in incident.jobs and incident.may_pass:
            return _gone_on(state, incident, event)
    return state


def _gone_on(state: ClusterState, incident: Incident, event: JobResumed) -> ClusterState:
    left = [f for f in incident.failures if f.job != event.job or event.rank not in {f.rank, None}]
    if any(failure.is_stall for failure in left):
        whole = with_failures(incident, left)
        # who waited for the rank that goes on will follow it, but not at once
        return state.with_incident(whole if whole.root is incident.root else replace(whole, updated_at=event.at))
    note = f"went on by itself after {max(event.at - incident.opened_at, 0):.1f} s, with iteration {event.iteration}"
    closed = replace(incident, status=IncidentStatus.CLOSED, closed_at=event.at, note=note)
    return state.with_job(forgiven(state.jobs[event.job])).with_incident(closed)


def incident_dismissed(state: ClusterState, event: IncidentDismissed) -> ClusterState:
    """Raises IllegalTransition if it is not open (any more), or if a job has failed by now: that needs an answer."""
    incident = state.incidents.get(event.incident)
    if incident is None or incident.status is not IncidentStatus.OPEN or not incident.is_of_nodes:
        raise IllegalTransition(f"{event.incident} cannot be dismissed: {incident}")
    held = state.breaker_since is not None and incident.severity is Severity.SEV1 and not incident.is_only_symptoms
    closed = replace(incident, status=IncidentStatus.CLOSED, closed_at=event.at, note=event.reason, held=held)
    return state.with_incident(closed)


def incident_diagnosed(state: ClusterState, event: IncidentDiagnosed) -> ClusterState:
    """Kept with the incident; nothing follows from it."""
    incident = state.incidents.get(event.incident)
    return state if incident is None else state.with_incident(replace(incident, diagnosis=event))
