"""Plans made ahead: after every change, all that may come next is solved before it comes.

Each event that may come next is folded and decided by the production code; what the planner then asks the allocation is
solved and kept under the question itself. A kept answer is therefore always that of a fresh solve; a question that
nobody foresaw is solved when it is asked.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.cluster import ClusterState, Node, NodeStatus
from unicron_lib.domain.events import Event, FailureDetected, JobFinished, NodeJoined
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.journal import fold
from unicron_lib.domain.judging import Policy
from unicron_lib.domain.plans import PlanKind
from unicron_lib.domain.recovery import decide
from unicron_lib.errors import InfeasibleError
from unicron_lib.planning.allocation import Allocation, Request
from unicron_lib.planning.plan_table import METHOD, Families, Key, key_of

AT_ONCE = Policy(root_cause_grace_s=0.0, settle_s=0.0, together_s=0.0)
"""What will be decided once there is nothing left to wait for."""

Solve = Callable[[Request], Allocation]


class Table:
    """Answers by question: `answer` looks up and else solves, `foresee` fills the table."""

    def __init__(self, solve: Solve, *, timer: Callable[[], float]) -> None:
        self._solve = solve
        self._timer = timer
        self._kept: Mapping[Key, Allocation] = {}
        self.lookups = self.hits = 0

    def __len__(self) -> int:
        return len(self._kept)

    def answer(self, request: Request) -> Allocation:
        """The allocation, from the table if it was foreseen. Raises NotEnoughGpus as `allocate` does."""
        started = self._timer()
        self.lookups += 1
        found = self._kept.get(key_of(request))
        if found is None:
            return self._solve(request)
        self.hits += 1
        return replace(found, method=METHOD, solve_s=self._timer() - started)

    def foresee(
        self, state: ClusterState, plan: Callable[[ClusterState, Respond, Solve], object], *, go_on: Callable[[], bool]
    ) -> int:
        """Have `plan` plan for everything that may come next, the likeliest first, as long as `go_on` says so.

        What is no longer a next step is forgotten. The number of events that were planned for.
        """
        alike = Families(self._solve, timer=self._timer)
        kept: dict[Key, Allocation] = {}

        def remember(request: Request) -> Allocation:
            key = key_of(request)
            kept[key] = kept.get(key) or self._kept.get(key) or alike.solve(request)
            return kept[key]

        planned = 0
        for after, respond in next_steps(state):
            if not go_on():
                break
            try:
                plan(after, respond, remember)
            except InfeasibleError:
                continue
            planned += 1
        self._kept = {key: allocation for key, allocation in kept.items() if allocation.optimal}
        return planned


def next_steps(state: ClusterState) -> Iterator[tuple[ClusterState, Respond]]:
    """Each state that one event leads to, with the decision to share out anew that follows."""
    for event in likely(state):
        after = fold(state, event)
        action = decide(after, event.at, AT_ONCE)
        if isinstance(action, Respond) and action.kind is PlanKind.REALLOCATE:
            yield after, action


def likely(state: ClusterState) -> Iterator[Event]:
    """What may come next, the likeliest first: a node is lost or found broken, a job ends, a node joins or comes back.

    Of nodes that hold the same jobs, one stands for all. A job's own failure needs no allocation.
    """
    at = _newest(state)
    ready = _one_of_each(state)
    for node in ready:
        yield _failure(node, ErrorKind.NODE_LOST, at)
    for name, job in sorted(state.jobs.items()):
        if job.assignment is not None and job.wants_gpus:
            yield JobFinished(id=f"ahead/finished/{name}", at=at, job=name, generation=job.generation, iteration=job.iteration)
    for node in ready:
        yield _failure(node, ErrorKind.ECC_ERROR, at)
    away = [node for _, node in sorted(state.nodes.items()) if node.status is NodeStatus.LOST]
    for node in away:
        yield _joined(node, node.id, at)
    if ready:
        yield _joined(ready[0], "ahead", at)


def _newest(state: ClusterState) -> float:
    """The newest time that the state knows of: the events come after it."""
    told = [incident.updated_at for incident in state.incidents.values()]
    return max([*told, *(plan.decided_at for plan in state.plans.values())], default=0.0)


def _one_of_each(state: ClusterState) -> list[Node]:
    alike: dict[Key, Node] = {}
    for node in state.healthy_nodes:
        held = tuple(
            (name, sum(slot.node == node.id for slot in job.assignment.slots))
            for name, job in sorted(state.jobs.items())
            if job.assignment is not None and node.id in job.nodes
        )
        alike.setdefault((node.num_gpus, *held), node)
    return list(alike.values())


def _failure(node: Node, kind: ErrorKind, at: float) -> FailureDetected:
    name = f"ahead/{kind}/{node.id}"
    method = DetectionMethod.NODE_HEALTH
    failure = Failure(id=name, kind=kind, method=method, seen_at=at, node=node.id, boot=node.boot)
    return FailureDetected(id=name, at=at, failure=failure)


def _joined(like: Node, name: str, at: float) -> NodeJoined:
    return NodeJoined(
        id=f"ahead/joined/{name}",
        at=at,
        node=name,
        boot=f"ahead/{name}",
        address=like.address,
        num_gpus=like.num_gpus,
        rack=like.rack,
    )
