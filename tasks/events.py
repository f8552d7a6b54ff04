"""Tell Prefect what happened. Nothing depends on it: the journal has it already."""

import asyncio

from prefect.events import emit_event

from unicron_lib.domain.cluster import Incident

OPENED = "unicron.incident.opened"
UPDATED = "unicron.incident.updated"
CLOSED = "unicron.incident.closed"


async def emit_incident(name: str, incident: Incident) -> None:
    """Emit `name` for `incident`; the resource is the incident, the jobs and the node are related."""
    related = [{"prefect.resource.id": f"unicron.job.{job}", "prefect.resource.role": "job"} for job in incident.jobs]
    if incident.node:
        related.append({"prefect.resource.id": f"unicron.node.{incident.node}", "prefect.resource.role": "node"})
    resource = {"prefect.resource.id": f"unicron.incident.{incident.id}", "prefect.resource.name": incident.id}
    payload = {
        "incident": incident.id,
        "kind": incident.kind,
        "severity": incident.severity.name if incident.severity else None,
        "reason": incident.note,
    }
    await asyncio.to_thread(emit_event, event=name, resource=resource, related=related, payload=payload)
