"""The part of the fold that follows nodes: they join, fall silent, are isolated and come back."""

from dataclasses import replace

from unicron_lib.domain.cluster import ClusterState, Incident, Node, NodeStatus
from unicron_lib.domain.events import (
    BreakerReset,
    BreakerTripped,
    NodeCleared,
    NodeJoined,
    NodeNoted,
    NodeQuarantined,
    NodeReleased,
    NodeSettled,
    NodeSuspected,
)
from unicron_lib.domain.failing import has_left_empty, record
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.incidents import planned_change, reopened, with_claimed_fault, without_hold
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.domain.plans import PlanKind


def node_joined(state: ClusterState, event: NodeJoined) -> ClusterState:
    """A new life of an agent ends the one before; quarantine outlives both, and a snoozed node gets no ranks yet."""
    before = state.nodes.get(event.node)
    if before and before.boot == event.boot:
        return state
    node = Node(
        id=event.node,
        boot=event.boot,
        address=event.address,
        num_gpus=event.num_gpus,
        since=event.at,
        rack=event.rack,
        pool=event.pool,
        gpu_model=event.gpu_model,
    )
    if before and before.status is NodeStatus.QUARANTINED:  # a new agent does not mend the hardware
        kept = replace(node, status=before.status, since=before.since, reason=before.reason, losses=before.losses)
        return state.with_node(kept)
    if before and before.status is not NodeStatus.LOST and not has_left_empty(state, before):
        state = record(state, _lost_unnoticed(before, event), event.at)
    node = replace(node, losses=state.nodes[node.id].losses if before else ())
    if event.snoozed_until > event.at:
        return state.with_node(_snoozed(node, event.snoozed_until))
    return state.with_node(node).with_incident(planned_change(event, node=event.node))


def _lost_unnoticed(before: Node, event: NodeJoined) -> Failure:
    return Failure(
        id=f"{before.id}/{before.boot}/replaced",
        kind=ErrorKind.NODE_LOST,
        method=DetectionMethod.NODE_HEALTH,
        seen_at=event.at,
        node=before.id,
        boot=before.boot,
        evidence=f"the agent of {before.id} started anew before its old life counted as lost: all its ranks are gone",
    )


def _snoozed(node: Node, until: float) -> Node:
    reason = f"lost {len(node.losses)} times within an hour: it has to stay for {until - node.since:.0f} s before it gets ranks"
    return replace(node, status=NodeStatus.SNOOZED, snoozed_until=until, reason=reason)


def leave_announced(state: ClusterState, event: LeaveAnnounced) -> ClusterState:
    """Its jobs leave it, as planned. Who is lost or isolated has none; the first word of a life holds."""
    node = state.nodes.get(event.node)
    if node is None or node.boot != event.boot or node.status in {NodeStatus.LOST, NodeStatus.QUARANTINED, NodeStatus.LEAVING}:
        return state
    leaving = replace(node, status=NodeStatus.LEAVING, since=event.at, reason=event.reason, leaves_at=event.leaves_at)
    incident = replace(planned_change(event, node=node.id), jobs=state.jobs_on(node.id))
    return with_claimed_fault(state.with_node(replace(leaving, snoozed_until=0.0)), incident)


def node_released(state: ClusterState, event: NodeReleased) -> ClusterState:
    """The end of a quarantine, or of a snooze."""
    node = state.nodes.get(event.node)
    if node is None or node.status not in {NodeStatus.QUARANTINED, NodeStatus.SNOOZED}:
        return state
    return _back(state, node, event)


def node_quarantined(state: ClusterState, event: NodeQuarantined) -> ClusterState:
    """Isolated by a person: its jobs leave it, and what the breaker held back of it is settled."""
    node = state.nodes.get(event.node)
    if node is None or node.status in {NodeStatus.LOST, NodeStatus.QUARANTINED}:
        return state
    out = replace(node, status=NodeStatus.QUARANTINED, since=event.at, reason=event.reason, snoozed_until=0.0)
    state = without_hold(state, lambda incident: incident.node == node.id)
    return state.with_node(out).with_incident(planned_change(event, node=node.id))


def node_settled(state: ClusterState, event: NodeSettled) -> ClusterState:
    """The end of a snooze."""
    node = state.nodes.get(event.node)
    if node is None or node.boot != event.boot or node.status is not NodeStatus.SNOOZED:
        return state
    return _back(state, node, event)


def _back(state: ClusterState, node: Node, event: NodeReleased | NodeSettled) -> ClusterState:
    ready = replace(node, status=NodeStatus.READY, since=event.at, reason="", snoozed_until=0.0)
    return state.with_node(ready).with_incident(planned_change(event, node=node.id))


def node_suspected(state: ClusterState, event: NodeSuspected) -> ClusterState:
    """Silent: not yet a failure, but nothing is decided on its account."""
    node = state.nodes.get(event.node)
    if node is None or node.boot != event.boot or node.status is not NodeStatus.READY:
        return state
    return state.with_node(replace(node, status=NodeStatus.SUSPECT, since=event.at, reason=event.reason))


def node_cleared(state: ClusterState, event: NodeCleared) -> ClusterState:
    """Heard of again. If GPUs were shared out anew without it meanwhile, that is done once more."""
    node = state.nodes.get(event.node)
    if node is None or node.boot != event.boot or node.status is not NodeStatus.SUSPECT:
        return state
    state = state.with_node(replace(node, status=NodeStatus.READY, since=event.at, reason=""))
    passed_over = (it for it in state.plans.values() if it.plan.kind is PlanKind.REALLOCATE and it.decided_at >= node.since)
    return state.with_incident(planned_change(event, node=node.id)) if any(passed_over) else state


def node_noted(state: ClusterState, event: NodeNoted) -> ClusterState:
    """For people: nothing follows from a note."""
    node = state.nodes.get(event.node)
    if node is None or node.boot != event.boot:
        return state
    others = {code: text for code, text in node.notes.items() if code != event.code}
    notes = {**others, event.code: event.text} if event.active else others
    return state.with_node(replace(node, notes=notes))


def breaker_tripped(state: ClusterState, event: BreakerTripped) -> ClusterState:
    """From now on no node is isolated."""
    return state if state.breaker_since is not None else replace(state, breaker_since=event.at, breaker_reason=event.reason)


def breaker_reset(state: ClusterState, event: BreakerReset) -> ClusterState:
    """Nodes may be isolated again: what the breaker held back is open again for each node that is still the same and in use."""
    state = replace(state, breaker_since=None, breaker_reason="")
    held = {incident.node: incident for incident in state.incidents.values() if incident.held and incident.plan is None}
    state = without_hold(state, lambda incident: incident.plan is None)
    for incident in held.values():  # the newest of each node
        if not event.false_alarm and _is_in_use(state, incident):
            state = state.with_incident(reopened(incident, state.jobs_on(incident.node or ""), event.at))
    return state


def _is_in_use(state: ClusterState, incident: Incident) -> bool:
    root, node = incident.root, state.nodes[incident.node or ""]
    return root is not None and root.boot == node.boot and node.status not in {NodeStatus.LOST, NodeStatus.QUARANTINED}
