"""Systems that look after each job by itself: nobody moves GPUs from one job to another.

Every job sits where it was put. What a system does when something breaks is its `Habit`, a few lines a system; this file is
what they share. A job that arrives later takes free GPUs in the order of arrival, as large a size as it can get.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unicron_lib.simulation.allocation_rules import Rule, best
from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.policy import Change, Event, FaultStruck, JobArrived, JobDone, NodeBack
from unicron_lib.simulation.seats import Seats
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob

Phases = tuple[tuple[Use, float], ...]
"""What a job's GPUs do before it trains (again), each with its seconds."""


class Habit(Protocol):
    """What a system does about a fault."""

    @property
    def name(self) -> str:
        """One word for tables."""
        ...

    @property
    def fitted(self) -> tuple[str, ...]:
        """Inputs fitted to published results."""
        ...

    @property
    def waits(self) -> bool:
        """Whether a job stands still until its lost node is repaired; else it goes on with fewer GPUs."""
        ...

    @property
    def takes_spares(self) -> bool:
        """Whether free GPUs stand in for lost ones."""
        ...

    def efficiency(self, job: SimJob) -> float:
        """Its throughput without failures, relative to Megatron's."""
        ...

    def finding_out(self, fault: Fault, job: SimJob, cluster: SimCluster) -> Phases:
        """From the fault until the restart could begin if there were GPUs."""
        ...

    def restarting(self, fault: Fault, job: SimJob, cluster: SimCluster, *, at_s: float) -> Phases:
        """From then on until the first new iteration; the fault was `at_s`."""
        ...

    def growing(self, job: SimJob) -> Phases:
        """What it takes to use GPUs that came back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EachByItself:
    """The policy of a habit. `share` divides the cluster at the start: the best allocation, as the paper's comparisons had."""

    habit: Habit
    share: Rule = best

    @property
    def name(self) -> str:
        """The habit's."""
        return self.habit.name

    @property
    def fitted(self) -> tuple[str, ...]:
        """The habit's."""
        return self.habit.fitted

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> "HabitRun":
        """A fresh run."""
        by_name = {job.job: job for job in jobs}
        return HabitRun(habit=self.habit, share=self.share, cluster=cluster, jobs=by_name, seats=Seats.of(cluster))


@dataclass(slots=True)
class HabitRun:
    """The jobs' seats, and for each job what it is owed by absent nodes and until when it does something else than train.

    `resumes` has the phases that follow as soon as a waiting job has its GPUs, with the cause.
    """

    habit: Habit
    share: Rule
    cluster: SimCluster
    jobs: dict[str, SimJob]
    seats: Seats
    owed: dict[str, dict[int, int]] = field(default_factory=dict)
    busy_until_s: dict[str, float] = field(default_factory=dict)
    resumes: dict[str, tuple[Phases, str]] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)

    def begin(self) -> Iterator[Change]:
        """Share the cluster out."""
        early = [job for job in self.jobs.values() if job.arrives_s <= 0]
        given = self.share(early, self.cluster.num_gpus)
        for job in sorted(given, key=lambda name: (-given[name], name)):
            if given[job]:
                self.seats.take(job, given[job])
                yield self._training(job, 0.0, "")
            else:
                self.queue.append(job)

    def on(self, event: Event, now_s: float) -> Iterator[Change]:
        """What becomes of the jobs that the event concerns."""
        match event:
            case FaultStruck(fault=fault, cause=cause) if fault.takes_node:
                yield from self._lose(fault, cause, now_s)
            case FaultStruck(fault=fault, cause=cause):
                hit = self.seats.sitting(fault.node, fault.rank_share)
                # what stands still anyway has no process that could fail
                if hit and hit not in self.resumes:
                    yield from self._recover(hit, fault, cause, now_s)
            case NodeBack(node=node, cause=cause):
                yield from self._back(node, cause, now_s)
            case JobArrived(job=job):
                self.queue.append(job)
                yield from self._launch(now_s)
            case JobDone(job=job):
                for belongings in (self.owed, self.busy_until_s, self.resumes):
                    belongings.pop(job, None)
                self.seats.give(job, self.seats.num_held(job))
                yield from self._launch(now_s)

    def _lose(self, fault: Fault, cause: str, now_s: float) -> Iterator[Change]:
        for job, gpus in sorted(self.seats.lose(fault.node).items()):
            missing = gpus
            if self.habit.takes_spares:
                missing -= self.seats.take(job, gpus)
            if missing:
                self.owed.setdefault(job, {})[fault.node] = missing
            yield from self._recover(job, fault, cause, now_s)

    def _recover(self, job: str, fault: Fault, cause: str, now_s: float) -> Iterator[Change]:
        if job in self.resumes and self._must_wait(job):
            yield self._standing(job, now_s, cause)
            return
        spec = self.jobs[job]
        first = self.habit.finding_out(fault, spec, self.cluster)
        then = self.habit.restarting(fault, spec, self.cluster, at_s=now_s)
        if not self._must_wait(job):
            self.resumes.pop(job, None)
            yield from self._through((*first, *then), job, now_s, cause)
            return
        self.resumes[job] = (then, cause)
        yield from self._through(first, job, now_s, cause, trains=False)

    def _must_wait(self, job: str) -> bool:
        too_few = self.seats.num_held(job) < self.jobs[job].min_gpus
        return too_few or (self.habit.waits and bool(self.owed.get(job)))

    def _back(self, node: int, cause: str, now_s: float) -> Iterator[Change]:
        self.seats.back(node)
        for job in sorted(job for job, owed in self.owed.items() if node in owed):
            before = self.seats.num_held(job)
            self.seats.take_at(job, node, self.owed[job].pop(node))
            if not self._must_wait(job):
                yield from self._enlarged(job, before, cause, now_s)
            else:
                yield self._standing(job, now_s, self.resumes[job][1])
        yield from self._launch(now_s)

    def _enlarged(self, job: str, before: int, cause: str, now_s: float) -> Iterator[Change]:
        """It has GPUs back: go on if it had to wait for them, else grow if they make it faster."""
        start_s = max(now_s, self.busy_until_s.get(job, 0.0))
        if job in self.resumes:
            phases, _ = self.resumes.pop(job)
            if start_s > now_s:
                yield self._standing(job, now_s, cause)
            yield from self._through(phases, job, start_s, cause)
        elif self.jobs[job].flops(self.seats.num_held(job)) > self.jobs[job].flops(before):
            yield from self._through(self.habit.growing(self.jobs[job]), job, start_s, cause)

    def _launch(self, now_s: float) -> Iterator[Change]:
        """Start who has waited longest, on the largest size that is free; who does not fit keeps nobody waiting."""
        for job in list(self.queue):
            size = max((size for size in self.jobs[job].throughput_flops if size <= self.seats.num_free), default=0)
            if size:
                self.queue.remove(job)
                self.seats.take(job, size)
                yield self._training(job, now_s, "")

    def _through(self, phases: Phases, job: str, from_s: float, cause: str, *, trains: bool = True) -> Iterator[Change]:
        """One phase after the other, then training, or standing still until the GPUs are there."""
        at_s = from_s
        for use, lasts_s in phases:
            if lasts_s > 0:
                yield Change(job=job, gpus=self.seats.num_held(job), from_s=at_s, flops=0.0, use=use, cause=cause)
                at_s += lasts_s
        self.busy_until_s[job] = at_s
        yield self._training(job, at_s, cause) if trains else self._standing(job, at_s, cause)

    def _standing(self, job: str, from_s: float, cause: str) -> Change:
        gpus, use = self.seats.num_held(job), Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
        return Change(job=job, gpus=gpus, from_s=from_s, flops=0.0, use=use, cause=cause)

    def _training(self, job: str, from_s: float, cause: str) -> Change:
        spec, gpus = self.jobs[job], self.seats.num_held(job)
        flops = self.habit.efficiency(spec) * spec.flops(gpus)
        # running on all GPUs again is nobody's fault any more
        return Change(job=job, gpus=gpus, from_s=from_s, flops=flops, cause=cause if self.owed.get(job) else "")
