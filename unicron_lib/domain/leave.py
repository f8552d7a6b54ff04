"""What a node that is going to leave puts into the journal: why, and until when its jobs have time."""

from dataclasses import dataclass
from typing import Literal

ANNOUNCED = "leave_announced"
"""The kind of the incident: a planned change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAnnounced:
    """A node's present life ends by `leaves_at` (epoch s), as its cloud or its operator wants it; the next is as any other.

    `reason` completes the sentence "the node leaves: ...".
    """

    id: str
    at: float
    node: str
    boot: str
    reason: str
    leaves_at: float
    type: Literal["leave_announced"] = "leave_announced"
