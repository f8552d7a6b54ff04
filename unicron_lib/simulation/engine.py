"""The engine: a heap of what is to happen, a counter for what happens at once, and one look at the invariants after each.

It knows the hardware (what is struck, away, repaired), the clock and the work that jobs have done; what becomes of the jobs
is the policy's word. The same trace, jobs and policy give the same outcome, to the last bit.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from unicron_lib.errors import UserError
from unicron_lib.simulation.faults import Fault, Trace
from unicron_lib.simulation.ledger import Ledger, Segment
from unicron_lib.simulation.policy import (
    Answer,
    Change,
    Event,
    FaultStruck,
    JobArrived,
    JobDone,
    NodeBack,
    Policy,
    Run,
    Wake,
    Woken,
)
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

STORY = 60
"""So many of the last happenings are told when an invariant is broken."""

ROUNDING = 1e-9


class Violation(AssertionError):
    """An invariant does not hold: what, in which run, and how it came there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A finished run: its segments in the order of their ends, and the faults by cause, in the order of time.

    Faults that met a node which was away already are `missed`.
    """

    policy: str
    fitted: tuple[str, ...]
    trace: str
    cluster: SimCluster
    jobs: tuple[SimJob, ...]
    duration_s: float
    segments: tuple[Segment, ...]
    faults: dict[str, Fault]
    missed: int


@dataclass(frozen=True, slots=True)
class _Due:
    """The announced change with this number, unless it has been replaced."""

    job: str
    number: int


@dataclass(frozen=True, slots=True)
class _Ready:
    """The job's work is done, unless its speed has changed since change `number`."""

    job: str
    number: int


def simulate(policy: Policy, trace: Trace, cluster: SimCluster, jobs: Sequence[SimJob]) -> Outcome:
    """Run `policy` through `trace`. Raises Violation, UserError for a fault on a node that the cluster has not."""
    beyond = next((fault for fault in trace.faults if fault.node >= cluster.num_nodes), None)
    if beyond:
        raise UserError(f"trace {trace.name} has a fault on node {beyond.node}, the cluster has {cluster.num_nodes} nodes")
    engine = _Engine(policy=policy, run=policy.start(cluster, jobs), trace=trace, cluster=cluster, jobs=jobs)
    return engine.outcome()


@dataclass(slots=True)
class _Engine:
    policy: Policy
    run: Run
    trace: Trace
    cluster: SimCluster
    jobs: Sequence[SimJob]
    ledger: Ledger = field(default_factory=Ledger)
    heap: list[tuple[float, int, Event | Fault | _Due | _Ready]] = field(default_factory=list)
    counter: int = 0
    now_s: float = 0.0
    away: dict[int, tuple[float, str]] = field(default_factory=dict)
    announced: dict[str, dict[int, Change]] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    missed: int = 0
    story: deque[tuple[float, object]] = field(default_factory=lambda: deque(maxlen=STORY))
    by_name: dict[str, SimJob] = field(default_factory=dict)
    held: int = 0

    def outcome(self) -> Outcome:
        """Play everything until the trace ends."""
        self.by_name = {job.job: job for job in self.jobs}
        for fault in self.trace.faults:
            self._push(fault.at_s, fault)
        for job in self.jobs:
            if job.arrives_s > 0:
                self._push(job.arrives_s, JobArrived(job=job.job))
        self._take(self.run.begin())
        for job in self.jobs:
            if job.arrives_s <= 0 and job.job not in self.ledger.now:
                self._wait(job.job)
        while self.heap and self.heap[0][0] <= self.trace.duration_s:
            self.now_s, _, what = heapq.heappop(self.heap)
            self._happen(what)
        return self._closed()

    def _push(self, at_s: float, what: Event | Fault | _Due | _Ready) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (at_s, self.counter, what))

    def _happen(self, what: Event | Fault | _Due | _Ready) -> None:
        match what:
            case Fault():
                self._strike(what)
            case _Due(job=job, number=number):
                change = self.announced.get(job, {}).pop(number, None)
                if change:
                    self._apply(change, number)
                    self._check()
            case _Ready(job=job, number=number):
                if job in self.by_name and self.applied[job] == number:
                    self._end(job)
            case NodeBack(node=node):
                since_s, cause = self.away.pop(node)
                self.ledger.out_of_use(self.cluster.gpus_per_node, since_s, self.now_s, cause)
                self._tell(what)
            case JobArrived(job=job):
                self._wait(job)
                self._tell(what)
            case _:
                self._tell(what)

    def _wait(self, job: str) -> None:
        """It is there and holds nothing, until the policy says otherwise."""
        self._apply(Change(job=job, gpus=0, from_s=self.now_s, flops=0.0, use=Use.OTHER), self._number())

    def _strike(self, fault: Fault) -> None:
        if fault.node in self.away:
            self.missed += 1
            return
        cause = f"{len(self.faults) + 1:05d}/{fault.kind}/node-{fault.node:05d}"
        self.faults[cause] = fault
        if fault.takes_node:
            self.away[fault.node] = (self.now_s, cause)
            self._push(self.now_s + fault.repair_s, NodeBack(node=fault.node, cause=cause))
        self._tell(FaultStruck(fault=fault, cause=cause))

    def _end(self, job: str) -> None:
        self.announced.pop(job, None)
        self.held -= self.ledger.end(job, self.now_s)
        del self.by_name[job]
        self._tell(JobDone(job=job))

    def _number(self) -> int:
        self.counter += 1
        return self.counter

    def _tell(self, event: Event) -> None:
        self.story.append((self.now_s, event))
        self._take(self.run.on(event, self.now_s))

    def _take(self, answer: Answer) -> None:
        """What is said of now holds at once, what is said of later replaces what was announced for then."""
        for said in answer:
            self.story.append((self.now_s, said))
            at_s = said.at_s if isinstance(said, Wake) else said.from_s
            if at_s < self.now_s:
                self._broken(f"the policy speaks of {at_s} s, which is past: {said}")
            if isinstance(said, Wake):
                self._push(at_s, Woken())
                continue
            self._announce(said)
        self._check()

    def _announce(self, change: Change) -> None:
        if change.job not in self.by_name:
            self._broken(f"there is no job {change.job}, or it has ended")
        plans = self.announced.setdefault(change.job, {})
        for later in [number for number, other in plans.items() if other.from_s >= change.from_s]:
            del plans[later]
        number = self._number()
        if change.from_s <= self.now_s:
            self._apply(change, number)
            return
        plans[number] = change
        self._push(change.from_s, _Due(change.job, number))

    def _apply(self, change: Change, number: int) -> None:
        job = self.by_name[change.job]
        before = self.ledger.now.get(change.job)
        self.held += change.gpus - (before.gpus if before else 0)
        self.ledger.turn(change, self.now_s)
        self.applied[change.job] = number
        if change.gpus and self.now_s < job.arrives_s:
            self._broken(f"{job.job} holds GPUs before it arrives: {change}")
        if (0 < change.gpus < job.min_gpus and change.use is Use.TRAINING) or change.gpus < 0:
            self._broken(f"{job.job} trains on fewer GPUs than it can: {change}")
        if not 0 <= change.flops <= job.flops(change.gpus) * (1 + ROUNDING):
            self._broken(f"{job.job} is faster than it can be, {job.flops(change.gpus):g} FLOP/s: {change}")
        if change.flops and job.work_flop < inf:
            left = max(0.0, job.work_flop - self.ledger.work.get(job.job, 0.0))
            self._push(self.now_s + left / change.flops, _Ready(job.job, number))

    def _check(self) -> None:
        healthy = self.cluster.num_gpus - len(self.away) * self.cluster.gpus_per_node
        if self.held > healthy:
            held = {job: change.gpus for job, change in self.ledger.now.items()}
            self._broken(f"{self.held} GPUs are held, {healthy} are healthy: {held}, away {sorted(self.away)}")

    def _broken(self, what: str) -> None:
        told = "\n".join(f"  {at_s:14.3f} s  {said}" for at_s, said in self.story)
        raise Violation(f"{what}\nin {self.policy.name} on {self.trace.name} ({self.trace.source}) at {self.now_s} s:\n{told}")

    def _closed(self) -> Outcome:
        end_s = self.trace.duration_s
        for job in self.ledger.now:
            self.ledger.close(job, end_s)
        for since_s, cause in self.away.values():
            self.ledger.out_of_use(self.cluster.gpus_per_node, since_s, end_s, cause)
        return Outcome(
            policy=self.policy.name,
            fitted=self.policy.fitted,
            trace=self.trace.name,
            cluster=self.cluster,
            jobs=tuple(self.jobs),
            duration_s=end_s,
            segments=tuple(self.ledger.closed),
            faults=self.faults,
            missed=self.missed,
        )
