"""Unicron on very large clusters: the production decision and allocation, without a place for each rank.

Coarser than `unicron`: nodes are counted, not named; each job has whole nodes; the believed time between failures stays
what it was; restarts that do not help, silent nodes and the breaker are left out, and no job is given up. What remains is
the same code: the verdict on each failure is `recovery.decide`, the share of each job the production allocation, in nodes.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from unicron_lib.domain.actions import Respond, Wait
from unicron_lib.domain.cluster import ClusterState, Node
from unicron_lib.domain.events import FailureDetected
from unicron_lib.domain.failures import ErrorKind, Failure
from unicron_lib.domain.jobs import JobSpec, JobState, JobStatus
from unicron_lib.domain.judging import DEFAULT_POLICY, Policy
from unicron_lib.domain.plans import Assignment, Layout, PlanKind, Slot
from unicron_lib.domain.recovery import decide, on_event
from unicron_lib.errors import UserError
from unicron_lib.planning.allocation import Request
from unicron_lib.planning.waf import Demand
from unicron_lib.simulation.charges import Charges
from unicron_lib.simulation.durations import PAPER, Detection, Transition, detection_s, method_of, told_as
from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.policy import Answer, Change, Event, FaultStruck, JobArrived, JobDone, NodeBack, Wake, Woken
from unicron_lib.simulation.production import optimum
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

ALONE = Policy(breaker_share=1.0)
"""One failure is judged at a time, in a state that holds its node and its job only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The policy."""

    name: str = "unicron-fleet"
    fitted: tuple[str, ...] = ()
    detection: Detection = PAPER
    transition: Transition = field(default_factory=Transition)

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> "FleetRun":
        """A fresh cluster. Raises UserError for a job with a size that is not of whole nodes."""
        for job in jobs:
            odd = [size for size in job.throughput_flops if size % cluster.gpus_per_node]
            if odd:
                raise UserError(f"job {job.job} has the size {odd[0]}: a fleet is shared in nodes of {cluster.gpus_per_node}")
        return FleetRun(self, cluster, jobs)


class FleetRun:
    """One run. `nodes` is how many each job was given, `away` the numbers of those out of use, in order.

    `missing` are those of a job's that have been lost since.
    """

    def __init__(self, policy: Fleet, cluster: SimCluster, jobs: Sequence[SimJob]) -> None:
        self.policy, self.cluster = policy, cluster
        self.jobs = {job.job: job for job in sorted(jobs, key=lambda job: job.job)}
        self.nodes: dict[str, int] = {}
        self.missing: Counter[str] = Counter()
        self.away: list[int] = []
        self._share = optimum()
        self._verdicts: dict[tuple[ErrorKind, bool], tuple[PlanKind, float]] = {}
        self._charges = Charges()
        self._trains_from: dict[str, float] = {}
        self._demands: dict[tuple[str, int, bool], Demand] = {}
        self._known: dict[tuple[object, ...], dict[str, int]] = {}
        self._agenda: list[tuple[float, int, Callable[[float], Iterator[Change | Wake]]]] = []
        self._counter = 0

    def begin(self) -> Answer:
        """The first share-out, at work at once."""
        self.nodes = {name: 0 for name, job in self.jobs.items() if job.arrives_s <= 0}
        self.nodes = self._shared(frozenset())
        return [self._training(name, 0.0) for name, nodes in self.nodes.items() if nodes]

    def on(self, event: Event, now_s: float) -> Answer:
        """Failures are answered when they are found, everything else after the production's patience."""
        match event:
            case FaultStruck():
                yield from self._struck(event, now_s)
            case NodeBack(node=node, cause=cause):
                self.away.pop(bisect_left(self.away, node))
                yield self._later(now_s + DEFAULT_POLICY.settle_s, lambda at_s: self._replan(at_s, cause, is_return=True))
            case JobArrived(job=job):
                self.nodes[job] = 0
                yield self._later(now_s + DEFAULT_POLICY.settle_s, lambda at_s: self._replan(at_s, ""))
            case JobDone(job=job):
                del self.nodes[job], self.missing[job]
                yield self._later(now_s + DEFAULT_POLICY.settle_s, lambda at_s: self._replan(at_s, ""))
            case Woken():
                while self._agenda and self._agenda[0][0] <= now_s:
                    yield from heapq.heappop(self._agenda)[2](now_s)

    def _later(self, at_s: float, what: Callable[[float], Iterator[Change | Wake]]) -> Wake:
        self._counter += 1
        heapq.heappush(self._agenda, (at_s, self._counter, what))
        return Wake(at_s=at_s)

    def _struck(self, event: FaultStruck, now_s: float) -> Iterator[Change | Wake]:
        fault, job = event.fault, self._job_at(event.fault.node)
        if fault.takes_node:
            insort(self.away, fault.node)
        if job is None and not fault.takes_node:
            return
        if job:
            self.missing[job] += fault.takes_node
            self._trains_from[job] = inf
            gpus = self._held(job) * self.cluster.gpus_per_node
            use = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
            yield Change(job=job, gpus=gpus, from_s=now_s, flops=0.0, use=use, cause=event.cause)
        iteration_s = self.jobs[job].iteration_s if job else 0.0
        seen_s = detection_s(fault.kind, iteration_s, self.policy.detection)
        kind, patience_s = self._verdict(fault, has_job=job is not None)
        yield self._later(now_s + seen_s + patience_s, lambda at_s: self._answered(kind, job, event.cause, at_s))

    def _held(self, name: str) -> int:
        return self.nodes[name] - self.missing[name]

    def _job_at(self, node: int) -> str | None:
        """Jobs lie side by side, in the order of names, on the nodes that are there."""
        place = node - bisect_left(self.away, node)  # its own place, as long as it is there
        ends = list(accumulate(self._held(name) for name in self.nodes))
        index = bisect_right(ends, place)
        return list(self.nodes)[index] if index < len(ends) else None

    def _answered(self, kind: PlanKind, job: str | None, cause: str, now_s: float) -> Iterator[Change | Wake]:
        if job is not None and job not in self.nodes:
            return
        if kind is PlanKind.REALLOCATE:
            yield from self._replan(now_s, cause)
        elif job and self._trains_from[job] == inf and not self.missing[job]:  # else a share-out is about to come
            in_place = kind is PlanKind.REATTEMPT
            yield from self._moved(job, self.nodes[job], now_s, cause, faulted=True, in_place=in_place)

    def _verdict(self, fault: Fault, *, has_job: bool) -> tuple[PlanKind, float]:
        """The production's: on a lone failure it does not depend on names or times, so it is asked once a kind."""
        question = (fault.kind, has_job)
        if question not in self._verdicts:
            self._verdicts[question] = _verdict(fault, has_job=has_job, gpus_per_node=self.cluster.gpus_per_node)
        return self._verdicts[question]

    def _replan(self, now_s: float, cause: str, *, is_return: bool = False) -> Iterator[Change | Wake]:
        """Share out anew; a job that is smaller afterwards is so because of `cause`, unless that is the return of a node."""
        moving = frozenset(name for name in self.nodes if self._trains_from.get(name, 0.0) > now_s)
        before, self.nodes = self.nodes, self._shared(moving)
        self.missing.clear()
        for name in before:
            if self.nodes[name] != before[name] or name in moving:
                if cause and not is_return and self.nodes[name] != before[name]:
                    self._charges.resized(name, cause)
                yield from self._moved(name, before[name], now_s, cause, faulted=name in moving, in_place=False)

    def _moved(
        self, name: str, held: int, now_s: float, cause: str, *, faulted: bool, in_place: bool
    ) -> Iterator[Change | Wake]:
        per_node = self.cluster.gpus_per_node
        gpus = self.nodes[name] * per_node
        if not gpus:
            use = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
            self._trains_from[name] = now_s
            yield Change(job=name, gpus=0, from_s=now_s, flops=0.0, use=use, cause=cause)
            return
        at_s, held_gpus = now_s, held * per_node
        for use, seconds in self.policy.transition.phases(
            self.jobs[name], at_s=now_s, held_gpus=held_gpus, gpus=gpus, faulted=faulted, in_place=in_place
        ):
            if seconds > 0:
                yield Change(job=name, gpus=gpus, from_s=at_s, flops=0.0, use=use, cause=cause)
            at_s += seconds
        yield self._training(name, at_s)

    def _training(self, name: str, at_s: float) -> Change:
        gpus = self.nodes[name] * self.cluster.gpus_per_node
        self._trains_from[name] = at_s
        charged = self._charges.due(name, gpus, is_whole=not self.away)
        return Change(job=name, gpus=gpus, from_s=at_s, flops=self.jobs[name].flops(gpus), cause=charged)

    def _shared(self, faulted: frozenset[str]) -> dict[str, int]:
        """The production allocation; questions come back, since the number of nodes goes up and down."""
        num_nodes = self.cluster.num_nodes - len(self.away)
        question = (num_nodes, *((name, nodes, name in faulted) for name, nodes in self.nodes.items()))
        known = self._known.get(question)
        if known is None:
            demands = tuple(self._demand(name, nodes, faulted=name in faulted) for name, nodes in self.nodes.items())
            mtbf_node_s = self.cluster.mtbf_gpu_s / self.cluster.gpus_per_node
            found = self._share(Request(demands=demands, num_gpus=num_nodes, mtbf_gpu_s=mtbf_node_s)).gpus
            known = self._known[question] = {name: found[name] for name in self.nodes}
        return dict(known)

    def _demand(self, name: str, nodes: int, *, faulted: bool) -> Demand:
        known = self._demands.get((name, nodes, faulted))
        if known is None:
            job, per_node = self.jobs[name], self.cluster.gpus_per_node
            known = self._demands[name, nodes, faulted] = Demand(
                job=name,
                throughput_flops={size // per_node: flops for size, flops in job.throughput_flops.items()},
                weight=job.weight,
                current_gpus=nodes,
                current_flops=job.flops(nodes * per_node),
                faulted=faulted,
                transition_s=self.policy.transition.believed_s(job),
            )
        return known


def _verdict(fault: Fault, *, has_job: bool, gpus_per_node: int) -> tuple[PlanKind, float]:
    """What `recovery.decide` says of a failure in a state that holds nothing but its node and its job, and after how long."""
    held = Assignment(job="job", generation=1, layout=Layout(), slots=(Slot("node", 0),))
    job = JobState(spec=JobSpec(job="job"), status=JobStatus.RUNNING, generation=1, assignment=held)
    here = Node(id="node", boot="1", address="node", num_gpus=gpus_per_node)
    state = ClusterState(nodes={"node": here}, jobs={"job": job} if has_job else {})
    failure = Failure(
        id="failure",
        kind=told_as(fault.kind),
        method=method_of(fault.kind),
        seen_at=0.0,
        node="node",
        boot="1",
        job=None if fault.takes_node else "job",
        generation=1,
    )
    state, action = on_event(state, FailureDetected(id=failure.id, at=0.0, failure=failure), ALONE)
    passed_s = 0.0
    while isinstance(action, Wait):
        passed_s = action.until
        action = decide(state, passed_s, ALONE)
    assert isinstance(action, Respond), f"{fault.kind} calls for {action}"
    return action.kind, passed_s
