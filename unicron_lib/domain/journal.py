"""The fold: how each event of the journal changes the state of the cluster."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

from unicron_lib.domain import events as e
from unicron_lib.domain.carrying_out import plan_decided, recovery_completed, step_completed
from unicron_lib.domain.checked import LaunchChecked, NodesChecked
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.diagnosed import IncidentDiagnosed
from unicron_lib.domain.failing import failure_detected, fault_injected, incident_diagnosed, incident_dismissed, job_resumed
from unicron_lib.domain.job_life import (
    job_ended,
    job_submitted,
    loss_spiked,
    rank_done,
    rebalance_due,
    straggler_changed,
    throughput_measured,
)
from unicron_lib.domain.launch_checks import launch_checked, nodes_checked
from unicron_lib.domain.leave import LeaveAnnounced
from unicron_lib.domain.nodes import (
    breaker_reset,
    breaker_tripped,
    leave_announced,
    node_cleared,
    node_joined,
    node_noted,
    node_quarantined,
    node_released,
    node_settled,
    node_suspected,
)
from unicron_lib.domain.rank_done import RankDone

FOLDS: Mapping[type[e.Event], Callable[[ClusterState, Any], ClusterState]] = MappingProxyType(
    {
        e.NodeJoined: node_joined,
        e.NodeSuspected: node_suspected,
        e.NodeCleared: node_cleared,
        e.NodeReleased: node_released,
        e.NodeQuarantined: node_quarantined,
        e.NodeSettled: node_settled,
        e.NodeNoted: node_noted,
        LeaveAnnounced: leave_announced,
        NodesChecked: nodes_checked,
        LaunchChecked: launch_checked,
        e.FailureDetected: failure_detected,
        e.FaultInjected: fault_injected,
        e.JobResumed: job_resumed,
        e.IncidentDismissed: incident_dismissed,
        IncidentDiagnosed: incident_diagnosed,
        e.BreakerTripped: breaker_tripped,
        e.BreakerReset: breaker_reset,
        e.JobSubmitted: job_submitted,
        e.ThroughputMeasured: throughput_measured,
        e.RebalanceDue: rebalance_due,
        e.StragglerDetected: straggler_changed,
        e.StragglerCleared: straggler_changed,
        e.LossSpiked: loss_spiked,
        RankDone: rank_done,
        e.JobFinished: job_ended,
        e.JobCancelled: job_ended,
        e.PlanDecided: plan_decided,
        e.StepCompleted: step_completed,
        e.RecoveryCompleted: recovery_completed,
    }
)
"""What each event does to the state; a test holds it against the union of all events."""


def fold(state: ClusterState, event: e.Event) -> ClusterState:
    """The state after `event`, the next entry of the journal. Raises IllegalTransition if it cannot follow."""
    return replace(FOLDS[type(event)](state, event), seq=state.seq + 1)


def fold_all(events: Iterable[e.Event], start: ClusterState | None = None) -> ClusterState:
    """The state after all `events`."""
    return reduce(fold, events, start or ClusterState())
