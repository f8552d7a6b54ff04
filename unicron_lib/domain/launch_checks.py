"""The node check before a job's first start: whether a plan has to wait for one, of which nodes, and until when. Pure."""

from dataclasses import dataclass, replace

from unicron_lib.domain.checked import LaunchChecked, NodesChecked
from unicron_lib.domain.cluster import ClusterState, Node
from unicron_lib.domain.jobs import JobState, JobStatus

FRESH_S = 6 * 3600.0
"""A node that has passed a check within that time, and has not failed since, is not checked again before a start."""
NUM_PARTNERS = 2
"""Beside one node: with two that are healthy, the answer is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCheck:
    """The planned changes `incidents` wait for a check of `nodes`, for the sake of `jobs`, until the time `until` (epoch s)."""

    incidents: tuple[str, ...]
    jobs: tuple[str, ...]
    nodes: tuple[str, ...]
    until: float


def check_before_launch(state: ClusterState, now: float, limit_s: float) -> LaunchCheck | None:
    """The check that the open planned changes wait for, `limit_s` at most; None if they wait for none (0: never).

    Only first starts wait, and only for nodes without ranks. Whoever has trained already and has no GPUs waits for nothing.
    """
    planned = [incident for incident in state.open_incidents if not incident.is_failure]
    new = [job for job in state.jobs.values() if _is_new(job)]
    robbed = [job for job in state.jobs.values() if job.restored and job.wants_gpus and not job.gpus]
    if not planned or not new or robbed or all(incident.launch_check for incident in planned):
        return None
    began = planned[0].opened_at
    nodes = _to_check(state, {job.spec.pool for job in new}, now)
    if not nodes or not began <= now < began + limit_s:  # a clock set back must not hold us for long
        return None
    names = tuple(sorted(job.spec.job for job in new))
    return LaunchCheck(incidents=tuple(it.id for it in planned), jobs=names, nodes=nodes, until=began + limit_s)


def failed_at(state: ClusterState, node: Node) -> float:
    """When it was lost last, or when something of its own was found to be broken; 0 if never."""
    broken = (it.opened_at for it in state.incidents.values() if it.is_failure and it.node == node.id and it.is_of_nodes)
    return max((*node.losses, *broken), default=0.0)


def nodes_checked(state: ClusterState, event: NodesChecked) -> ClusterState:
    """Remembered for as long as this life of the agent lasts."""
    for name, boot in event.passed.items():
        node = state.nodes.get(name)
        if node is not None and node.boot == boot:
            state = state.with_node(replace(node, checked_at=event.at))
    return state


def launch_checked(state: ClusterState, event: LaunchChecked) -> ClusterState:
    """What waited for the check waits no more, and keeps what it has told."""
    for name in event.incidents:
        if name in state.incidents:
            state = state.with_incident(replace(state.incidents[name], launch_check=event.told))
    return state


def _is_new(job: JobState) -> bool:
    return job.status is JobStatus.QUEUED and not job.restored and job.pending is None


def _to_check(state: ClusterState, pools: set[str], now: float) -> tuple[str, ...]:
    """Nodes without ranks of the `pools` ("": of any) that have passed no check lately, and whom they can meet."""
    free = [node for node in state.healthy_nodes if not state.jobs_on(node.id) and ("" in pools or node.pool in pools)]
    due = [node.id for node in free if not failed_at(state, node) < node.checked_at or now - node.checked_at > FRESH_S]
    partners = [node.id for node in free if node.id not in due]
    return (*due, *partners[: max(0, NUM_PARTNERS + 1 - len(due))]) if due else ()
