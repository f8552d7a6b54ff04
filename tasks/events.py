"""Tell Prefect what happened. Nothing depends on it: the journal has it already."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from prefect.events import emit_event

from unicron_lib.domain import events as e
from unicron_lib.domain.checked import LaunchChecked
from unicron_lib.domain.cluster import ClusterState, Incident
from unicron_lib.domain.failures import ErrorKind, Failure
from unicron_lib.domain.incidents import incident_id
from unicron_lib.domain.leave import LeaveAnnounced

log = logging.getLogger("unicron.events")
OPENED = "unicron.incident.opened"
UPDATED = "unicron.incident.updated"
CLOSED = "unicron.incident.closed"
DIAGNOSED = "unicron.incident.diagnosed"

NAMES: Mapping[type[e.Event], str] = {
    e.StragglerDetected: "unicron.job.degraded",
    e.StragglerCleared: "unicron.job.recovered",
    e.JobResumed: "unicron.job.resumed",
    e.BreakerTripped: "unicron.breaker.tripped",
    e.BreakerReset: "unicron.breaker.reset",
    LaunchChecked: "unicron.job.launch_checked",
    LeaveAnnounced: "unicron.node.leaving",
}
"""Events of the journal that have a name of their own in Prefect."""

NODE_NOTED = ("unicron.node.noted", "unicron.node.note_ended")
NOTES: Mapping[str, tuple[str, str]] = {
    "gpu_blind": ("unicron.monitor.blind", "unicron.monitor.restored"),
    "gpu_probe_hung": ("unicron.monitor.blind", "unicron.monitor.restored"),
    "kernel_log_blind": ("unicron.monitor.blind", "unicron.monitor.restored"),
    "monitor_blind": ("unicron.monitor.blind", "unicron.monitor.restored"),
    "controller_blind": ("unicron.monitor.blind", "unicron.monitor.restored"),
    "spot_notices_blind": ("unicron.monitor.blind", "unicron.monitor.restored"),
    "observations_lost": ("unicron.monitor.blind", "unicron.monitor.restored"),
    "xid": ("unicron.gpu.xid", "unicron.gpu.xid_ended"),
}
"""What a note of a node is called when it begins and when it is over, by its code; all others are NODE_NOTED."""

FAILURES: Mapping[ErrorKind, str] = {
    ErrorKind.PROCESS_EXIT: "unicron.job.process_exited",
    ErrorKind.TASK_HANG: "unicron.job.step_stalled",
    ErrorKind.NCCL_TIMEOUT: "unicron.job.step_stalled",
}
LOSS_SPIKED, LOSS_SETTLED = "unicron.job.loss_spiked", "unicron.job.loss_settled"
NODE_UNHEALTHY = "unicron.node.unhealthy"


async def emit(event: e.Event, state: ClusterState) -> None:
    """Emit what `event`, which is in `state` already, is called in Prefect, and what it did to an incident."""
    name = name_of(event)
    if name:
        await _emit(name, *_about(event), payload=_payload(event))
    for change, incident in _changes(event, state):
        await emit_incident(change, incident)


async def emit_incident(name: str, incident: Incident) -> None:
    """Emit `name` for `incident`; the resource is the incident, the jobs and the node are related."""
    payload = {
        "incident": incident.id,
        "kind": incident.kind,
        "severity": incident.severity.name if incident.severity else None,
        "count": incident.count,
        "reason": incident.note,
    }
    await _emit(name, f"incident.{incident.id}", incident.jobs, incident.node, payload=payload)


async def emit_diagnosis(incident: Incident) -> None:
    """Emit why `incident`, which has been diagnosed, happened; it and its jobs and node are named as in `emit_incident`."""
    told = incident.diagnosis
    assert told is not None
    payload = {
        "incident": incident.id,
        "kind": told.kind,
        "severity": incident.severity.name if incident.severity else None,
        "source": told.source,
        "recoverable": told.recoverable,
        "confidence": told.confidence,
        "evidence": next(iter(told.evidence), None),
    }
    await _emit(DIAGNOSED, f"incident.{incident.id}", incident.jobs, incident.node, payload=payload)


def name_of(event: e.Event) -> str | None:
    """The Prefect event that tells of `event`; None if only its incident does."""
    match event:
        case e.NodeNoted():
            begun, ended = NOTES.get(event.code, NODE_NOTED)
            return begun if event.active else ended
        case e.LossSpiked():
            return LOSS_SETTLED if event.over else LOSS_SPIKED
        case e.FailureDetected(failure=failure) if failure.job is None:
            return None if failure.symptom else NODE_UNHEALTHY
        case e.FailureDetected(failure=failure):
            return FAILURES.get(failure.kind)
        case _:
            return NAMES.get(type(event))


def _about(event: e.Event) -> tuple[str, tuple[str, ...], str | None]:
    """The resource that an event is about, the jobs and the node that are related to it."""
    told = event.failure if isinstance(event, e.FailureDetected) else event
    job, node, jobs = (getattr(told, name, None) for name in ("job", "node", "jobs"))
    if job:
        return f"job.{job}", (), node
    return (f"node.{node}", (), None) if node else ("cluster", tuple(jobs or ()), None)


def _payload(event: e.Event) -> dict[str, Any]:
    told: e.Event | Failure = event.failure if isinstance(event, e.FailureDetected) else event
    names = ("kind", "rank", "iteration", "ratio", "code", "text", "active", "reason", "evidence", "told", "leaves_at")
    return {name: value for name in names if (value := getattr(told, name, None)) is not None}


def _changes(event: e.Event, state: ClusterState) -> Iterator[tuple[str, Incident]]:
    """What an event did to incidents: opened, joined, or over by itself."""
    match event:
        case e.FailureDetected(failure=failure):
            holds = (i for i in state.open_incidents if any(f.id == failure.id for f in i.failures))
            yield from ((OPENED if i.id == incident_id(failure.id) else UPDATED, i) for i in holds)
        case e.IncidentDismissed(incident=name):
            yield CLOSED, state.incidents[name]
        case e.JobResumed(job=job, at=at):
            yield from ((CLOSED, i) for i in state.incidents.values() if i.closed_at == at and i.jobs == (job,))
        case _:
            opened = state.incidents.get(incident_id(event.id))
            yield from [(OPENED, opened)] if opened else []


async def _emit(name: str, about: str, jobs: tuple[str, ...], node: str | None, *, payload: dict[str, Any]) -> None:
    related = [{"prefect.resource.id": f"unicron.job.{job}", "prefect.resource.role": "job"} for job in jobs]
    if node:
        related.append({"prefect.resource.id": f"unicron.node.{node}", "prefect.resource.role": "node"})
    resource = {"prefect.resource.id": f"unicron.{about}", "prefect.resource.name": about.partition(".")[2] or about}
    try:
        await asyncio.to_thread(emit_event, event=name, resource=resource, related=related, payload=payload)
    except Exception as error:  # noqa: BLE001 - whatever ails Prefect, what is journalled must be acknowledged
        log.warning("Prefect did not take the event %s: %s", name, error)
