"""Why an incident happened, as far as logs tell: an entry of the journal that changes no decision."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentDiagnosed:
    """What logs and evidence tell of why an incident happened. For people: nothing is decided by it.

    `kind` is an `ErrorKind`, which may differ from the incident's: that is what the recovery took it for. `evidence` are lines
    as `FILE:LINE  TEXT`, `similar` the ids of past incidents, `unread` says which logs could not be read, and why.
    `confidence` is between 0 and 1.
    """

    id: str
    at: float
    incident: str
    kind: str
    root_cause: str
    source: Literal["infrastructure", "user", "unknown"]
    recoverable: bool
    confidence: float
    mitigation: str
    reason: str
    evidence: tuple[str, ...] = ()
    similar: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    type: Literal["incident_diagnosed"] = "incident_diagnosed"
