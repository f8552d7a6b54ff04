"""Unicron in the simulator: production decides and plans, only faults, clock and durations are modelled."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unicron_lib.domain.actions import TripBreaker, Wait
from unicron_lib.domain.cluster import NodeStatus
from unicron_lib.domain.events import (
    BreakerReset,
    FailureDetected,
    JobFinished,
    NodeJoined,
    NodeReleased,
    submitted,
)
from unicron_lib.domain.failures import DetectionMethod, ErrorKind, Failure
from unicron_lib.domain.incidents import incident_id
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Assignment, Plan, PlanKind, Slot
from unicron_lib.planning.ahead import AT_ONCE
from unicron_lib.planning.scene import current_slots
from unicron_lib.simulation.charges import Charges
from unicron_lib.simulation.durations import PAPER, Detection, Transition, detection_s, method_of, told_as, undetected_s
from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.policy import (
    Answer,
    Change,
    Event,
    FaultStruck,
    JobArrived,
    JobDone,
    NodeBack,
    Wake,
    Woken,
)
from unicron_lib.simulation.production import Production, Share, optimum
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

INSPECTION_S = 3600.0
"""After so long a person has found that an isolated node is sound, or that the breaker may be reset."""

ENDLESS = 10**9
"""Restarts that a job may have: no fault of a trace is its own."""


def production_share(_: "UnicronRun") -> Share:
    """The allocation as it is in production."""
    return optimum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unicron:
    """The policy. `detection` is None without in-band detection; without `knows_costs` the planner takes moves to be free.

    `share` makes the allocation of one run, the production one by default; it gets that run's production state.
    """

    name: str = "unicron"
    fitted: tuple[str, ...] = ()
    detection: Detection | None = PAPER
    transition: Transition = field(default_factory=Transition)
    knows_costs: bool = True
    share: "Callable[[UnicronRun], Share]" = production_share
    keeps_journal: bool = False

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> "UnicronRun":
        """A fresh cluster with all nodes, before any job."""
        return UnicronRun(self, cluster, jobs)


def node_name(number: int) -> str:
    """The name of a node; names sort as numbers do."""
    return f"node-{number:05d}"


class UnicronRun:
    """One run: what production knows (`production`), and what is really so.

    `down` are nodes that are away, by name, with the cause; `first_slots` the GPUs that each job began with.
    """

    def __init__(self, policy: Unicron, cluster: SimCluster, jobs: Sequence[SimJob]) -> None:
        self.policy = policy
        self.cluster = cluster
        self.jobs = {job.job: job for job in jobs}
        self.production = Production(
            mtbf_gpu_s=cluster.mtbf_gpu_s, share=policy.share(self), keeps_journal=policy.keeps_journal
        )
        self.down: dict[str, str] = {}
        self._broken: dict[str, str] = {}
        self._trains_from: dict[str, float] = {}
        self._reached: dict[str, int] = {}
        self.first_slots: dict[str, tuple[Slot, ...]] = {}
        self._done: set[str] = set()
        self._charges = Charges()
        self._returns: dict[str, str] = {}
        self._agenda: list[tuple[float, int, Callable[[float], Iterator[Change | Wake]]]] = []
        self._counter = 0

    def begin(self) -> Answer:
        """Nodes join, jobs are submitted, and the first plan is carried out at once: all policies begin with jobs at work."""
        for number in range(self.cluster.num_nodes):
            self._join(node_name(number), 0.0)
        for job in self.jobs.values():
            if job.arrives_s <= 0:
                self._submit(job, 0.0)
        plan = self.production.answer(0.0, AT_ONCE)
        if isinstance(plan, Plan):
            self.production.carried_out(plan, self.jobs, 0.0)
        self.first_slots = {name: self._slots(name) for name in self.jobs}
        return [self._training(name, 0.0) for name, slots in self.first_slots.items() if slots]

    def on(self, event: Event, now_s: float) -> Answer:
        """Tell production, let it decide until nothing is left to decide now."""
        match event:
            case FaultStruck():
                yield from self._struck(event, now_s)
            case NodeBack(node=node):
                cause = self.down.pop(node_name(node))
                self._returned(node_name(node), cause, now_s)
                self._came_to(node_name(node), cause, now_s)
            case JobArrived(job=job):
                self._submit(self.jobs[job], now_s)
            case JobDone(job=job):
                self._finished(job, now_s)
            case Woken():
                while self._agenda and self._agenda[0][0] <= now_s:
                    yield from heapq.heappop(self._agenda)[2](now_s)
        yield from self._decide(now_s)

    def _decide(self, now_s: float) -> Iterator[Change | Wake]:
        while True:
            held = {name: len(self._slots(name)) for name in self.production.state.jobs}
            match self.production.answer(now_s):
                case None:
                    return
                case Wait(until=until):
                    yield self._later(until, lambda _: iter(()))
                    return
                case TripBreaker():
                    yield self._later(now_s + INSPECTION_S, self._reset_breaker)
                case plan:
                    yield from self._carry_out(plan, held, now_s)

    def _later(self, at_s: float, what: Callable[[float], Iterator[Change | Wake]]) -> Wake:
        self._counter += 1
        heapq.heappush(self._agenda, (at_s, self._counter, what))
        return Wake(at_s=at_s)

    # what is told of the world

    def _struck(self, event: FaultStruck, now_s: float) -> Iterator[Change | Wake]:
        """Whoever has a rank there stands still from now on; the report follows when somebody finds out."""
        fault, node = event.fault, node_name(event.fault.node)
        gpu = int(fault.rank_share * self.cluster.gpus_per_node)
        if fault.takes_node:
            self.down[node] = event.cause
        hit = [
            name
            for name in self.production.state.jobs
            if any(slot.node == node and (fault.takes_node or slot.gpu == gpu) for slot in self._slots(name))
        ]
        for name in hit:
            if self._trains_from.get(name, now_s + 1) <= now_s and name not in self._broken:
                self._reached[name] = int(now_s // self.jobs[name].iteration_s)
            self._broken[name] = event.cause
            use = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
            yield Change(job=name, gpus=self._healthy(name), from_s=now_s, flops=0.0, use=use, cause=event.cause)
        job = hit[0] if hit else None
        if job is None and not fault.takes_node:
            return
        iteration_s = self.jobs[job].iteration_s if job else 0.0
        policy = self.policy.detection
        seen_s = undetected_s(fault.kind, self.cluster) if policy is None else detection_s(fault.kind, iteration_s, policy)
        failure = self._failure(fault, event.cause, Slot(node, gpu), job)
        yield self._later(now_s + seen_s, lambda at_s: self._reported(failure, at_s))

    def _failure(self, fault: Fault, cause: str, slot: Slot, job: str | None) -> dict[str, object]:
        """What will be reported: broken hardware is told of the node, everything else of the rank and its generation."""
        found: dict[str, object] = {
            "id": cause,
            "kind": told_as(fault.kind),
            "method": method_of(fault.kind),
            "node": slot.node,
        }
        if fault.takes_node or job is None:
            return {**found, "boot": self.production.state.nodes[slot.node].boot}
        rank = self._slots(job).index(slot)
        state = self.production.state.jobs[job]
        return {**found, "job": job, "generation": state.generation, "rank": rank, "iteration": self._reached.get(job, -1)}

    def _reported(self, found: dict[str, object], now_s: float) -> Iterator[Change | Wake]:
        failure = Failure(seen_at=now_s, **found)  # type: ignore[arg-type]
        self.production.tell(FailureDetected(id=failure.id, at=now_s, failure=failure))
        if failure.job is None and failure.node and failure.node not in self.down:  # repaired before anybody knew
            yield self._inspection(failure.node, failure.id, now_s)

    def _join(self, node: str, now_s: float) -> NodeJoined:
        name, gpus = f"{node}/{now_s:.6f}", self.cluster.gpus_per_node
        event = NodeJoined(id=f"joined/{name}", at=now_s, node=node, boot=name, address=node, num_gpus=gpus)
        self.production.tell(event)
        return event

    def _submit(self, job: SimJob, now_s: float) -> None:
        spec = JobSpec(
            job=job.job,
            weight=job.weight,
            min_gpus=job.min_gpus,
            max_gpus=job.max_gpus,
            global_batch_size=job.max_gpus,
            throughput_flops=dict(job.throughput_flops),
            transition_s=self.policy.transition.believed_s(job) if self.policy.knows_costs else 0.0,
            max_restarts=ENDLESS,
            restart_window_s=0.0,
        )
        self.production.tell(submitted(spec, submission="1", at=now_s))

    def _finished(self, job: str, now_s: float) -> None:
        state = self.production.state.jobs[job]
        generation, told = state.generation, f"finished/{job}"
        self._trains_from.pop(job, None)
        self._done.add(job)
        self.production.tell(JobFinished(id=told, at=now_s, job=job, generation=generation, iteration=state.iteration))

    def _returned(self, node: str, cause: str, now_s: float) -> None:
        """Repaired, or found sound: a lost node joins with a new life, an isolated one is released."""
        status = self.production.state.nodes[node].status
        if node in self.down or status is NodeStatus.READY:
            return
        if status is NodeStatus.LOST:
            told: NodeJoined | NodeReleased = self._join(node, now_s)
        else:
            told = NodeReleased(id=f"released/{node}/{now_s:.6f}", at=now_s, node=node)
            self.production.tell(told)
        self._returns[incident_id(told.id)] = cause

    def _came_to(self, node: str, cause: str, now_s: float) -> None:
        """Where the breaker kept the node in use, its jobs have been standing there: now a restart helps them."""
        for name in self.production.state.jobs:
            slots = self._slots(name)
            if name in self._broken and any(slot.node == node for slot in slots):
                rank = next(rank for rank, slot in enumerate(slots) if slot.node == node)
                failure = Failure(
                    id=f"{cause}/{name}",
                    kind=ErrorKind.PROCESS_EXIT,
                    method=DetectionMethod.PROCESS,
                    seen_at=now_s,
                    job=name,
                    generation=self.production.state.jobs[name].generation,
                    node=node,
                    rank=rank,
                    iteration=self._reached.get(name, -1),
                )
                self.production.tell(FailureDetected(id=failure.id, at=now_s, failure=failure))

    def _inspection(self, node: str, cause: str, now_s: float) -> Wake:
        def sound(at_s: float) -> Iterator[Change | Wake]:
            self._returned(node, cause, at_s)
            return iter(())

        return self._later(now_s + INSPECTION_S, sound)

    def _reset_breaker(self, now_s: float) -> Iterator[Change | Wake]:
        self.production.tell(BreakerReset(id=f"reset/{now_s:.6f}", at=now_s))
        return iter(())

    # what becomes of the jobs

    def _carry_out(self, plan: Plan, held: dict[str, int], now_s: float) -> Iterator[Change | Wake]:
        cause = self._cause(plan)
        faulted = {name for name in held if name in self._broken}
        for name in {step.job for step in plan.steps}.difference(a.job for a in plan.assignments):
            self.production.carried_out(plan, (name,), now_s)
            self._trains_from.pop(name, None)
            if name not in self._done:  # of those, the engine has taken the GPUs
                yield self._waiting(name, now_s, cause)
        for assignment in plan.assignments:
            name = assignment.job
            self._broken.pop(name, None)
            yield from self._moved(plan, assignment, held[name], faulted=name in faulted, cause=cause, now_s=now_s)
        self.production.carried_out(plan, (), now_s)
        for node in plan.quarantined:
            if node not in self.down:
                yield self._inspection(node, cause, now_s)

    def _moved(
        self, plan: Plan, assignment: Assignment, held: int, *, faulted: bool, cause: str, now_s: float
    ) -> Iterator[Change | Wake]:
        name, gpus = assignment.job, self._healthy(assignment.job)
        phases = self.policy.transition.phases(
            self.jobs[name],
            at_s=now_s,
            held_gpus=held,
            gpus=assignment.num_gpus,
            faulted=faulted,
            in_place=plan.kind is PlanKind.REATTEMPT,
        )
        at_s = now_s
        for use, seconds in phases:
            if seconds > 0:
                yield Change(job=name, gpus=gpus, from_s=at_s, flops=0.0, use=use, cause=cause)
            at_s += seconds
        if assignment.num_gpus != held and cause in self._failures(plan):
            self._charges.resized(name, cause)
        yield self._training(name, at_s)

        def done(then_s: float) -> Iterator[Change | Wake]:
            self.production.carried_out(plan, (name,), then_s)
            return iter(())

        yield self._later(at_s, done)

    def _training(self, name: str, at_s: float) -> Change:
        """It trains, unless a node of its is away and nobody knows."""
        gpus = len(self._slots(name))
        self._trains_from[name] = at_s
        away = [self.down[slot.node] for slot in self._slots(name) if slot.node in self.down]
        if away:
            use = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
            self._broken[name] = away[0]
            return Change(job=name, gpus=self._healthy(name), from_s=at_s, flops=0.0, use=use, cause=away[0])
        charged = self._charges.due(name, gpus, is_whole=not self.down)
        return Change(job=name, gpus=gpus, from_s=at_s, flops=self.jobs[name].flops(gpus), cause=charged)

    def _waiting(self, name: str, at_s: float, cause: str) -> Change:
        use = Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION if cause else Use.OTHER
        return Change(job=name, gpus=0, from_s=at_s, flops=0.0, use=use, cause=cause)

    def _slots(self, name: str) -> tuple[Slot, ...]:
        job = self.production.state.jobs.get(name)
        return current_slots(job) if job and job.wants_gpus else ()

    def _healthy(self, name: str) -> int:
        return sum(slot.node not in self.down for slot in self._slots(name))

    def _failures(self, plan: Plan) -> list[str]:
        incidents = (self.production.state.incidents[name] for name in plan.incidents)
        return [incident.root.id for incident in incidents if incident.root]

    def _cause(self, plan: Plan) -> str:
        """The fault that the plan answers, or whose node is back; none for what jobs do."""
        returns = (self._returns[name] for name in plan.incidents if name in self._returns)
        return next(iter((*self._failures(plan), *returns)), "")
