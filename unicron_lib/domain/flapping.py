"""Nodes that come and go: how long one has to stay before it gets ranks again."""

from unicron_lib.domain.cluster import Node

LOSS_MEMORY_S = 3600.0
"""Losses of a node that are older are forgotten."""


def losses_until(node: Node, at: float) -> tuple[float, ...]:
    """The times at which `node` was lost within the last hour, with one more at `at`."""
    return (*(time for time in node.losses if at - time < LOSS_MEMORY_S), at)


def snooze_until(node: Node | None, now: float, *, snooze_s: float, losses: int = 2, window_s: float = 600.0) -> float:
    """Until when (epoch s) a node that joins at `now` gets no ranks: 0.0, at once, unless it was lost too often.

    Too often is `losses` times within `window_s`. `node` is what the journal knows of it, None if nothing.
    """
    recent = sum(now - time < window_s for time in node.losses) if node else 0
    return now + snooze_s if recent >= losses and snooze_s > 0 else 0.0
