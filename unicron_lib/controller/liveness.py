"""Is a node alive? Pure: time and facts in, verdict and reason out."""

from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds until a node is judged; none of them ever adds up over several outages.

    Heartbeats come every second, so `suspect_after_s` is three missed ones. `lost_silent_s` is the limit for an open
    connection that says nothing: a frozen agent, a network that swallows packets. `lost_closed_s` is the one for a
    connection that has ended: something has answered for the node, and an agent that lives dials again within a second. If
    ranks elsewhere have lost theirs at the same time, it is `lost_missed_s`: two witnesses, and a job that stands still.
    """

    suspect_after_s: float = 3.0
    lost_silent_s: float = 5.0
    lost_closed_s: float = 3.0
    lost_missed_s: float = 1.5


DEFAULT_PATIENCE = Patience()
SAME_TIME_S = 1.0
"""Between two heartbeats: a complaint that came so long before the last one may be about the same end."""
GOODBYE = "its agent stopped and said goodbye"
"""How a connection ends whose agent was asked to stop."""


class Verdict(StrEnum):
    """SUSPECT is silent, but not judged yet; unreachable is not failed."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What is known of the connection to a node, on a monotonic clock.

    `heard_at` is when its last frame came; for a node that was known when the controller started and that has not
    `dialled` since, that start, so that it has the full grace. If its last connection has ended, `ended_at` is when, and
    `ending` says how, as the first half of a sentence.
    """

    heard_at: float
    ended_at: float | None = None
    ending: str = ""
    dialled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """Another node's rank did an iteration that cannot be done without the ranks of the node in question."""

    job: str
    iteration: int
    reporter: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """A rank on another node has lost ranks of its job, of which the node in question has some."""

    job: str
    generation: int
    rank: int
    reporter: str
    at: float


def judge(
    now: float,
    contact: Contact,
    stepping: Stepping | None = None,
    patience: Patience = DEFAULT_PATIENCE,
    *,
    complaint: Complaint | None = None,
) -> tuple[Verdict, str]:
    """The verdict on a node and its reason in a sentence.

    A connection that has ended makes the node suspect at once, and lost after `lost_closed_s` unless it dials again, or after
    `lost_missed_s` if its ranks are missed, too; silence makes it suspect after `suspect_after_s` and lost after
    `lost_silent_s`. Evidence that its ranks step is a sign of life: each outage gets the full grace from the last of them.
    """
    silent_s = now - contact.heard_at
    if contact.ended_at is None and silent_s < patience.suspect_after_s:
        return Verdict.ALIVE, f"heard {max(0.0, silent_s):.1f} s ago"
    reason = _reason(now, contact)
    if contact.ended_at is not None and complaint and complaint.at >= contact.heard_at - SAME_TIME_S:
        patience = replace(patience, lost_closed_s=patience.lost_missed_s)
        reason += f", and {complaint.job} rank {complaint.rank} at {complaint.reporter} has lost others, too"
    stepped_at = stepping.at if stepping else contact.heard_at
    if _is_lost(now, contact, contact.heard_at, patience) and _is_lost(now, contact, stepped_at, patience):
        return Verdict.LOST, reason
    if stepping and _is_lost(now, contact, contact.heard_at, patience):
        reason += (
            f", but job {stepping.job}, which needs its ranks, was seen finishing iteration {stepping.iteration} by "
            f"{stepping.reporter} {now - stepping.at:.1f} s ago"
        )
    return Verdict.SUSPECT, reason


def _is_lost(now: float, contact: Contact, alive_at: float, patience: Patience) -> bool:
    """Whether the grace is over for a node whose last sign of life came at `alive_at`."""
    closed = contact.ended_at is not None and now - max(contact.ended_at, alive_at) >= patience.lost_closed_s
    return closed or now - alive_at >= patience.lost_silent_s


def _reason(now: float, contact: Contact) -> str:
    if contact.ended_at is not None:
        return f"{contact.ending}, and it has not dialled again for {now - contact.ended_at:.1f} s"
    silent_s = now - contact.heard_at
    if not contact.dialled:
        return f"it has not dialled in within {silent_s:.1f} s of the controller's start"
    return f"its connection is open, but it has been silent for {silent_s:.1f} s"
