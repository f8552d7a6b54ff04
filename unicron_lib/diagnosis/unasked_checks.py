"""Which nodes are checked although nobody asked: idle ones only, while all is quiet, so that no job waits for it. Pure."""

from collections.abc import Mapping

from unicron_lib.diagnosis.check_consequences import to_check
from unicron_lib.domain.check_policy import CheckPolicy
from unicron_lib.domain.cluster import ClusterState, Node

SETTLE_S = 30.0
"""A node that has been idle and unchanged for so long is not about to get ranks."""
FAILED_WITHIN_S = 3600.0
"""What failed, and came back, longer ago than that has been seen to work since, or was checked."""
EVERY_S = 86400.0
NUM_PARTNERS = 2
"""Beside one node: with two that are healthy, the answer is exact."""


def due_nodes(state: ClusterState, policy: CheckPolicy, checked: Mapping[str, float], now: float) -> tuple[str, ...]:
    """The nodes to check now, those to exchange data with among them; `checked` says when each was checked last (epoch s)."""
    if policy == "never" or state.active_plan or state.open_incidents:
        return ()
    idle = [node for node in to_check(state, ()) if now - node.since >= SETTLE_S]
    due = [node.id for node in idle if _is_due(state, node, policy, checked.get(node.id, 0.0), now)]
    partners = [node.id for node in idle if node.id not in due]
    return (*due, *partners[: max(0, NUM_PARTNERS + 1 - len(due))]) if due else ()


def _is_due(state: ClusterState, node: Node, policy: CheckPolicy, checked_at: float, now: float) -> bool:
    failed_at = _failed_at(state, node)
    if failed_at > checked_at and now - max(failed_at, node.since) < FAILED_WITHIN_S:
        return True
    return policy == "idle" and now - checked_at > EVERY_S


def _failed_at(state: ClusterState, node: Node) -> float:
    """When it was lost last, or when something of its own was found to be broken."""
    broken = (it.opened_at for it in state.incidents.values() if it.is_failure and it.node == node.id and it.is_of_nodes)
    return max((*node.losses, *broken), default=0.0)
