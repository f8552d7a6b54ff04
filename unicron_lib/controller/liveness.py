"""Is a node alive? Pure: time and facts in, verdict and reason out."""

from dataclasses import dataclass
from enum import StrEnum

SUSPECT_AFTER_S = 3.0
"""Three missed heartbeats of one second."""
LOST_AFTER_S = 5.0


class Verdict(StrEnum):
    """SUSPECT is silent, but not judged yet; unreachable is not failed."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """What is known of the connection to a node, on a monotonic clock.

    `heard_at` is when its last frame came; for a node that was known when the controller started, that start, so
    that it has the full grace to dial in. `closed` tells that a connection was there and has ended.
    """

    heard_at: float
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """Another node's rank did an iteration that cannot be done without the ranks of the node in question."""

    job: str
    iteration: int
    reporter: str
    at: float


def judge(now: float, contact: Contact, stepping: Stepping | None = None) -> tuple[Verdict, str]:
    """The verdict on a node and its reason in a sentence.

    Evidence that its ranks step counts as a sign of life: each outage gets the full grace from the last of them.
    """
    silent_s = now - contact.heard_at
    if not contact.closed and silent_s < SUSPECT_AFTER_S:
        return Verdict.ALIVE, f"heard {max(0.0, silent_s):.1f} s ago"
    reason = f"{'its connection is closed and it has been' if contact.closed else 'it has been'} silent for {silent_s:.1f} s"
    seen_at = max(contact.heard_at, stepping.at if stepping else contact.heard_at)
    if now - seen_at >= LOST_AFTER_S:
        return Verdict.LOST, reason
    if stepping and silent_s >= LOST_AFTER_S:
        reason += (
            f", but job {stepping.job}, which needs its ranks, was seen finishing iteration {stepping.iteration} by "
            f"{stepping.reporter} {now - stepping.at:.1f} s ago"
        )
    return Verdict.SUSPECT, reason
