"""What needs no plan is journalled as such, by a flow and by plain code alike, and Prefect is told."""

import pytest

from flows.response import as_task, plain, respond
from tasks.health import publish
from tasks.planning import dismiss, trip_breaker
from unicron_lib.domain.actions import Dismiss, TripBreaker
from unicron_lib.domain.cluster import IncidentStatus, NodeStatus
from unicron_lib.domain.events import BreakerReset, BreakerTripped, FailureDetected, IncidentDismissed, NodeNoted
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.incidents import incident_id
from unicron_lib.errors import IllegalTransition


@pytest.fixture
def emitted(monkeypatch):
    """What Prefect is told."""
    told = []
    monkeypatch.setattr("tasks.events.emit_event", lambda **event: told.append(event))
    return told


def fault(site, name, node, kind=ErrorKind.ECC_ERROR, *, symptom=False):
    told = Failure(
        id=name, kind=kind, method=DetectionMethod.NODE_HEALTH, seen_at=1.0, node=node, boot="b", symptom=symptom, evidence="x"
    )
    return FailureDetected(id=name, at=1.0, failure=told)


def kinds(site, wanted):
    return [entry.event for entry in site.journal.entries() if isinstance(entry.event, wanted)]


async def test_a_lone_symptom_is_dismissed_and_the_job_runs_on(site, emitted):
    before = site.journal.refresh().jobs
    await publish(fault(site, "sym1", "node-1", ErrorKind.OTHER, symptom=True))
    await site.respond()
    state = site.journal.state
    incident = state.incidents[incident_id("sym1")]
    assert (incident.status, incident.plan, state.jobs) == (IncidentStatus.CLOSED, None, before)
    assert [event["event"] for event in emitted] == ["unicron.incident.opened", "unicron.incident.closed"]
    assert emitted[-1]["payload"]["reason"] == incident.note


async def test_a_breaker_trips_once_and_its_incidents_are_dismissed(site, emitted):
    """PB63: an event, nothing isolated, ranks untouched; then a person resets it."""
    before = site.journal.refresh().jobs
    for node in ("node-1", "node-2"):
        await publish(fault(site, f"f-{node}", node))
    await site.respond()
    state = site.journal.state
    assert (state.jobs, {node.status for node in state.nodes.values()}) == (before, {NodeStatus.READY})
    assert (len(kinds(site, BreakerTripped)), len(kinds(site, IncidentDismissed))) == (1, 2)
    assert [event["event"] for event in emitted].count("unicron.breaker.tripped") == 1
    await publish(BreakerReset(id="reset", at=2.0))
    assert site.journal.state.breaker_since is None
    assert emitted[-1]["event"] == "unicron.breaker.reset"


async def test_two_processes_trip_and_dismiss_once(site):
    for node in ("node-1", "node-2"):
        site.journal.append(fault(site, f"f-{node}", node))
    for _ in range(2):
        await plain(trip_breaker, TripBreaker(reason="too many"))
    action = Dismiss(incident=incident_id("f-node-1"), reason="held")
    await plain(dismiss, action)
    await plain(dismiss, action)
    assert (len(kinds(site, BreakerTripped)), len(kinds(site, IncidentDismissed))) == (1, 1)


async def test_a_job_that_failed_meanwhile_is_not_dismissed(site):
    site.journal.append(fault(site, "sym1", "node-1", ErrorKind.OTHER, symptom=True))
    site.fail("f1")
    with pytest.raises(IllegalTransition):
        await plain(dismiss, Dismiss(incident=incident_id("sym1"), reason="nothing but symptoms"))
    await respond(plain)
    assert site.journal.state.jobs["gpt-a"].generation == 2


async def test_notes_are_told_by_their_names(site, emitted):
    for number, (code, active) in enumerate([("gpu_blind", True), ("gpu_blind", False), ("xid", True), ("gpu_hot", True)]):
        await publish(NodeNoted(id=f"n{number}", at=1.0, node="node-1", boot="b", code=code, text="t", active=active))
    names = [event["event"] for event in emitted]
    assert names == ["unicron.monitor.blind", "unicron.monitor.restored", "unicron.gpu.xid", "unicron.node.noted"]
    assert {event["resource"]["prefect.resource.id"] for event in emitted} == {"unicron.node.node-1"}


def test_as_task_is_the_other_way_to_call_them():
    assert {task.name for task in (dismiss, trip_breaker)} == {"dismiss", "trip-breaker"}
    assert callable(as_task)
