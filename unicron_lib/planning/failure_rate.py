"""How often a new plan becomes necessary: the observed mean time between failures of a GPU, with a prior."""

import math
from collections.abc import Collection

from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, NodeStatus
from unicron_lib.domain.plans import PlanKind

PRIOR_FAILURES = 1.0
"""The prior counts as much as having seen so many failures, so that the first one halves it and no more."""

STEPS_PER_OCTAVE = 4
"""Far finer than the time is known, and coarse enough that plans made ahead stay the right ones while time goes by."""

JOINED = "node_joined"
OUT_OF_USE = frozenset({NodeStatus.LOST, NodeStatus.QUARANTINED})


def observed_mtbf_gpu_s(state: ClusterState, *, prior_mtbf_gpu_s: float, planning: Collection[str] = ()) -> float:
    """Mean GPU seconds between two failures that cause a re-planning.

    The posterior mean of the failure rate with a gamma prior: observed and prior time, divided by observed and prior
    failures. `planning` are incidents that the plan in the making reallocates for.
    """
    failures = sum(causes_replanning(state, incident, planning) for incident in state.incidents.values())
    seen_gpu_s = PRIOR_FAILURES * prior_mtbf_gpu_s + observed_gpu_s(state)
    return seen_gpu_s / (PRIOR_FAILURES + failures)


def rounded(mtbf_gpu_s: float, *, prior_mtbf_gpu_s: float) -> float:
    """The nearest of the prior's multiples by powers of two, `STEPS_PER_OCTAVE` of them between one and its double."""
    if not mtbf_gpu_s > 0 or not prior_mtbf_gpu_s > 0:
        return mtbf_gpu_s
    steps = round(STEPS_PER_OCTAVE * math.log2(mtbf_gpu_s / prior_mtbf_gpu_s))
    return float(prior_mtbf_gpu_s * 2 ** (steps / STEPS_PER_OCTAVE))


def causes_replanning(state: ClusterState, incident: Incident, planning: Collection[str] = ()) -> bool:
    """Whether GPUs had to be shared out anew because something broke; injected faults tell nothing of the machines."""
    if not incident.is_failure or incident.fault_at is not None or incident.status is IncidentStatus.MERGED:
        return False
    plan = state.plans.get(incident.plan or "")
    return incident.id in planning or (plan is not None and plan.plan.kind is PlanKind.REALLOCATE)


def observed_gpu_s(state: ClusterState) -> float:
    """GPU seconds that the cluster has been watched: each node from its first join on, until now or its end.

    Outages that are over count as watched: short ones do not matter, and long ones are rare.
    """
    now = _latest(state)
    first: dict[str, float] = {}
    for incident in state.incidents.values():
        if incident.kind == JOINED and incident.node:
            first[incident.node] = min(incident.opened_at, first.get(incident.node, incident.opened_at))
    watched_s = (
        node.num_gpus * max(0.0, (node.since if node.status in OUT_OF_USE else now) - first.get(name, now))
        for name, node in state.nodes.items()
    )
    return sum(watched_s)


def _latest(state: ClusterState) -> float:
    """The newest time that the state knows of: planning reads no clock."""
    told = [node.since for node in state.nodes.values()]
    told += [incident.updated_at for incident in state.incidents.values()]
    told += [plan.decided_at for plan in state.plans.values()]
    return max(told, default=0.0)
