"""Incidents: how one is opened, what joins it, and what becomes a part of another."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from unicron_lib.domain.cluster import MAX_FAILURES, ClusterState, Incident, IncidentStatus
from unicron_lib.domain.events import (
    JobCancelled,
    JobFinished,
    JobSubmitted,
    NodeCleared,
    NodeJoined,
    NodeQuarantined,
    NodeReleased,
    NodeSettled,
    RebalanceDue,
)
from unicron_lib.domain.failures import Failure, root_cause
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.domain.plans import content_id

NodesChange = NodeJoined | NodeCleared | NodeReleased | NodeSettled | NodeQuarantined | LeaveAnnounced
FAULT_AGE_S = 300.0
"""An injected fault that nobody noticed for longer explains nothing."""


def incident_id(cause: str) -> str:
    """The id of the incident that a failure or a planned event with the id `cause` opens."""
    return content_id("inc", cause)


def planned_change(
    event: NodesChange | JobSubmitted | JobFinished | JobCancelled | RebalanceDue,
    *,
    node: str | None = None,
    job: str | None = None,
) -> Incident:
    """The incident of a planned event: it asks for a new allocation."""
    return Incident(
        id=incident_id(event.id),
        kind=event.type,
        severity=None,
        opened_at=event.at,
        updated_at=event.at,
        jobs=(job,) if job else (),
        node=node,
    )


def opened_by(failure: Failure, jobs: tuple[str, ...], at: float) -> Incident:
    """The incident of a failure that nothing known explains."""
    return Incident(
        id=incident_id(failure.id),
        kind=failure.kind,
        severity=failure.severity,
        opened_at=at,
        updated_at=at,
        failures=(failure,),
        count=1,
        jobs=jobs,
        node=failure.node,
    )


def with_failures(incident: Incident, failures: Iterable[Failure]) -> Incident:
    """The incident with these failures, as far as they are kept; kind, severity and node are its root cause's."""
    told = tuple(failures)
    root = root_cause(told)
    assert root is not None
    return replace(incident, failures=_kept(told, root), kind=root.kind, severity=root.severity, node=root.node)


def _kept(failures: tuple[Failure, ...], root: Failure) -> tuple[Failure, ...]:
    """The root cause, the newest, and the newest stall of each rank: a hang is over when none of them is left."""
    if len(failures) <= MAX_FAILURES:
        return failures
    stalls = {(failure.job, failure.rank): failure.id for failure in failures if failure.is_stall}
    others = [failure.id for failure in failures if failure is not root and not failure.is_stall]
    kept = {root.id, *stalls.values(), *others[-MAX_FAILURES + 1 :]}
    return tuple(failure for failure in failures if failure.id in kept)


def joined(incident: Incident, failure: Failure, at: float) -> Incident:
    """The incident with one more failure; a new root cause begins its clock anew."""
    whole = with_failures(replace(incident, count=incident.count + 1), (*incident.failures, failure))
    return replace(whole, updated_at=at) if whole.root is failure else whole


def absorbed(state: ClusterState, incident: Incident, parts: Iterable[Incident]) -> tuple[ClusterState, Incident]:
    """The state with `parts` merged into `incident`, and the incident with all that is known of them.

    What was told of other nodes brings no jobs with it: those may be in the best of health.
    """
    failures: list[Failure] = []
    jobs = set(incident.jobs)
    for part in parts:
        merged = replace(part, status=IncidentStatus.MERGED, merged_into=incident.id)
        state = state.with_incident(merged)
        failures += part.failures
        jobs |= set() if part.is_of_nodes else set(part.jobs)
        opened_at = min(incident.opened_at, part.opened_at) if part.closed_at is None else incident.opened_at
        fault_at = part.fault_at if incident.fault_at is None else incident.fault_at
        incident = replace(incident, count=incident.count + part.count, opened_at=opened_at, fault_at=fault_at)
    return state, with_failures(replace(incident, jobs=tuple(sorted(jobs))), (*failures, *incident.failures))


def reopened(incident: Incident, jobs: tuple[str, ...], at: float) -> Incident:
    """The incident that nothing could be done about, with a new clock; `jobs` are those on its node by now."""
    again = replace(incident, status=IncidentStatus.OPEN, opened_at=at, updated_at=at, closed_at=None, fault_at=None)
    return replace(again, jobs=jobs, note="", held=True)


def without_hold(state: ClusterState, which: Callable[[Incident], bool]) -> ClusterState:
    """The state in which the breaker has forbidden nothing about these incidents."""
    for incident in state.incidents.values():
        if incident.held and which(incident):
            state = state.with_incident(replace(incident, held=False))
    return state


def with_claimed_fault(state: ClusterState, incident: Incident) -> ClusterState:
    """The injected fault that explains an incident is the zero of its clock, and of no later one's."""
    named = {f"{f.job}/{f.rank}" if f.job else str(f.node) for f in incident.failures} or {str(incident.node)}
    fresh = {target: at for target, at in state.faults.items() if target in named and at >= incident.opened_at - FAULT_AGE_S}
    if incident.fault_at is None and fresh:
        target, at = max(fresh.items(), key=lambda item: item[1])
        state = replace(state, faults={name: when for name, when in state.faults.items() if name != target})
        incident = replace(incident, fault_at=at)
    return state.with_incident(incident)
