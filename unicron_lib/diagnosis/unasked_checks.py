"""Which nodes are checked although nobody asked: idle ones only, while all is quiet, so that no job waits for it. Pure."""

from collections.abc import Mapping

from unicron_lib.diagnosis.check_consequences import to_check
from unicron_lib.diagnosis.node_check import CheckVerdict
from unicron_lib.domain.check_policy import CheckWhen
from unicron_lib.domain.cluster import ClusterState, Node
from unicron_lib.domain.launch_checks import NUM_PARTNERS, failed_at

SETTLE_S = 30.0
"""A node that has been idle and unchanged for so long is not about to get ranks."""
FAILED_WITHIN_S = 3600.0
"""What failed, and came back, longer ago than that has been seen to work since, or was checked."""
EVERY_S = 86400.0


def due_nodes(state: ClusterState, when: frozenset[CheckWhen], tried: Mapping[str, float], now: float) -> tuple[str, ...]:
    """The nodes to check now, those to exchange data with among them.

    `tried` says when a check of each began last (epoch s), whatever became of it.
    """
    if not when & {"rejoined", "idle"} or state.active_plan or state.open_incidents:
        return ()
    idle = [node for node in to_check(state, ()) if now - node.since >= SETTLE_S]
    due = [node.id for node in idle if _is_due(state, node, when, max(tried.get(node.id, 0.0), node.checked_at), now)]
    partners = [node.id for node in idle if node.id not in due]
    return (*due, *partners[: max(0, NUM_PARTNERS + 1 - len(due))]) if due else ()


def _is_due(state: ClusterState, node: Node, when: frozenset[CheckWhen], checked_at: float, now: float) -> bool:
    failed = failed_at(state, node)
    if failed > checked_at and now - max(failed, node.since) < FAILED_WITHIN_S:
        return True
    return "idle" in when and now - checked_at > EVERY_S


def told_before_launch(verdicts: Mapping[str, str]) -> str:
    """What a check before a start has found, by node, in a sentence: who passed is only counted."""
    good = sum(verdict == CheckVerdict.GOOD for verdict in verdicts.values())
    others = (f"{name} is {verdict}" for name, verdict in verdicts.items() if verdict != CheckVerdict.GOOD)
    return "; ".join((f"{good} of {len(verdicts)} nodes passed a check first", *others))
