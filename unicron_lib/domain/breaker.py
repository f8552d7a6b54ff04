"""The breaker: what says that most of the cluster is broken, or away, is more likely to be broken itself. Pure."""

from collections.abc import Mapping

from unicron_lib.domain.cluster import ClusterState, Node, NodeStatus
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.judging import Policy, Verdict

FEW = 2
"""So many nodes are needed to trip it: in the smallest cluster, too, one that is broken is isolated."""
USABLE = frozenset({NodeStatus.READY, NodeStatus.SUSPECT, NodeStatus.SNOOZED})
OUT = frozenset({NodeStatus.QUARANTINED, NodeStatus.LOST, NodeStatus.LEAVING})


def trips_breaker(state: ClusterState, verdicts: Mapping[str, Verdict], now: float, policy: Policy) -> str | None:
    """Why nothing may be isolated any more, None if it may; `verdicts` by incident."""
    return _too_many_isolated(state, verdicts, now, policy) or _too_many_lost(state, verdicts, now, policy)


def _too_many_isolated(state: ClusterState, verdicts: Mapping[str, Verdict], now: float, policy: Policy) -> str | None:
    """The nodes of all `verdicts`, with those isolated of late, against those that could have been used meanwhile.

    What a person has allowed by a reset, or isolated by hand, is in the whole, but not in the share.
    """
    asked = {node for name, verdict in verdicts.items() if not state.incidents[name].held for node in verdict.quarantine}
    asked = {node for node in asked if _was_usable(state.nodes[node], now, policy)}
    isolated = asked | _isolated_of_late(state, now, policy)
    whole = [node for node in state.nodes.values() if _was_usable(node, now, policy)]
    if not asked or not _is_most(len(isolated), len(whole), policy):
        return None
    return (
        f"{len(isolated)} of {len(whole)} nodes would be isolated within {policy.breaker_window_s:g} s, more than "
        f"{policy.breaker_share:.0%}: {', '.join(sorted(asked))} stay, and none is isolated before a person has looked"
    )


def _isolated_of_late(state: ClusterState, now: float, policy: Policy) -> set[str]:
    """Nodes that plans have isolated within the window, and nobody has taken back, except by a person's leave."""
    plans = [it.plan for it in state.plans.values() if it.plan.quarantined and now - it.decided_at < policy.breaker_window_s]
    allowed = {state.incidents[name].node for plan in plans for name in plan.incidents if state.incidents[name].held}
    isolated = {node for plan in plans for node in plan.quarantined if state.nodes[node].status is NodeStatus.QUARANTINED}
    return isolated - allowed


def _was_usable(node: Node, now: float, policy: Policy) -> bool:
    """Whether ranks could have been on the node within the window, the breaker's only yardstick."""
    out_of_late = node.status in OUT and now - node.since < policy.breaker_window_s
    return out_of_late or node.status in USABLE


def _is_most(part: int, whole: int, policy: Policy) -> bool:
    return part >= FEW and part > policy.breaker_share * whole


def _too_many_lost(state: ClusterState, verdicts: Mapping[str, Verdict], now: float, policy: Policy) -> str | None:
    """Nodes that are lost cannot be used, whatever is believed; but a person is told, and no more are taken out.

    Who has left as announced is no sign of anything.
    """
    if state.breaker_since is not None:
        return None
    away = {node.id: node.since for node in state.nodes.values() if node.status is NodeStatus.LOST and not node.has_left}
    incidents = (state.incidents[name] for name in verdicts)
    newest = max((away[it.node] for it in incidents if it.kind == ErrorKind.NODE_LOST and it.node in away), default=0.0)
    together = sorted(node for node, since in away.items() if 0 <= newest - since < policy.together_s)
    whole = sum(_was_usable(node, now, policy) for node in state.nodes.values())
    if not _is_most(len(together), whole, policy):
        return None
    return (
        f"{len(together)} of {whole} nodes were lost within {policy.together_s:g} s ({', '.join(together)}): look at the "
        "network and the control host first; jobs go on with what is left, and no node is isolated before a person has looked"
    )
