"""Unicron's recovery with a simple rule in place of its planner: equally, weighted, sized (the paper's section 7).

Whenever the number of healthy GPUs or of jobs changes, the rule shares all of them out again, whatever the move costs.
Detection and transitions take as long as Unicron's, so that only the allocation differs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unicron_lib.domain.failures import Severity
from unicron_lib.simulation.allocation_rules import RULES, Rule
from unicron_lib.simulation.durations import Transition, detection_s
from unicron_lib.simulation.faults import Fault
from unicron_lib.simulation.policy import Change, Event, FaultStruck, JobArrived, JobDone, NodeBack, Wake, Woken
from unicron_lib.simulation.seats import Seats
from unicron_lib.simulation.uses import Use
from unicron_lib.simulation.workload import SimCluster, SimJob


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOut:
    """The policy that follows the rule called `name`."""

    name: str
    transition: Transition = field(default_factory=Transition)
    fitted: tuple[str, ...] = ()

    def start(self, cluster: SimCluster, jobs: Sequence[SimJob]) -> "SharedOutRun":
        """A fresh run."""
        by_name = {job.job: job for job in jobs}
        return SharedOutRun(rule=RULES[self.name], transition=self.transition, jobs=by_name, seats=Seats.of(cluster))


@dataclass(slots=True)
class SharedOutRun:
    """`present` are the jobs that want GPUs, `hit` those that stand since a fault, with its cause."""

    rule: Rule
    transition: Transition
    jobs: dict[str, SimJob]
    seats: Seats
    present: set[str] = field(default_factory=set)
    hit: dict[str, str] = field(default_factory=dict)

    def begin(self) -> Iterator[Change]:
        """Share the cluster out."""
        self.present = {name for name, job in self.jobs.items() if job.arrives_s <= 0}
        for job, gpus in self._shares().items():
            self.seats.take(job, gpus)
            yield self._training(job, 0.0, "")

    def on(self, event: Event, now_s: float) -> Iterator[Change | Wake]:
        """What becomes of the jobs."""
        match event:
            case FaultStruck(fault=fault, cause=cause) if fault.takes_node:
                yield from self._lose(fault, cause, now_s)
            case FaultStruck(fault=fault, cause=cause):
                job = self.seats.sitting(fault.node, fault.rank_share)
                if job and job not in self.hit:
                    yield from self._restart(job, fault, cause, now_s)
            case NodeBack(node=node, cause=cause):
                self.seats.back(node)
                yield from self._share_again(now_s, cause)
            case JobArrived(job=job):
                self.present.add(job)
                yield from self._share_again(now_s, "")
            case JobDone(job=job):
                self.present.discard(job)
                self.hit.pop(job, None)
                self.seats.give(job, self.seats.num_held(job))
                yield from self._share_again(now_s, "")
            case Woken():
                yield from self._share_again(now_s, next(iter(self.hit.values()), ""))

    def _lose(self, fault: Fault, cause: str, now_s: float) -> Iterator[Change | Wake]:
        found_s = now_s
        for job in sorted(self.seats.lose(fault.node)):
            self.hit[job] = cause
            yield self._standing(job, now_s, cause)
            found_s = max(found_s, now_s + detection_s(fault.kind, self.jobs[job].iteration_s))
        yield Wake(at_s=found_s)

    def _restart(self, job: str, fault: Fault, cause: str, now_s: float) -> Iterator[Change]:
        spec, gpus = self.jobs[job], self.seats.num_held(job)
        yield self._standing(job, now_s, cause)
        seen_s = now_s + detection_s(fault.kind, spec.iteration_s)
        again = fault.severity is Severity.SEV3
        phases = self.transition.phases(spec, at_s=now_s, held_gpus=gpus, gpus=gpus, faulted=True, in_place=again)
        yield from self._through(phases, job, seen_s, cause)

    def _shares(self) -> dict[str, int]:
        num_gpus = self.seats.num_free + sum(self.seats.num_held(job) for job in self.present)
        return self.rule([self.jobs[name] for name in sorted(self.present)], num_gpus)

    def _share_again(self, now_s: float, cause: str) -> Iterator[Change]:
        before = {job: self.seats.num_held(job) for job in self.present}
        shares = self._shares()
        moved = sorted(job for job, gpus in shares.items() if gpus != before[job] or job in self.hit)
        # who shrinks goes first: the others sit down where it leaves
        for job in moved:
            self.seats.give(job, max(0, before[job] - shares[job]))
        for job in moved:
            self.seats.take(job, max(0, shares[job] - before[job]))
        for job in moved:
            why, is_hit = self.hit.get(job, cause), job in self.hit
            phases = self.transition.phases(
                self.jobs[job], at_s=now_s, held_gpus=before[job], gpus=shares[job], faulted=is_hit, in_place=False
            )
            yield from self._through(phases if shares[job] else (), job, now_s, why)
        self.hit.clear()

    def _through(self, phases: Sequence[tuple[Use, float]], job: str, from_s: float, cause: str) -> Iterator[Change]:
        at_s = from_s
        for use, lasts_s in phases:
            if lasts_s > 0:
                yield Change(job=job, gpus=self.seats.num_held(job), from_s=at_s, flops=0.0, use=use, cause=cause)
                at_s += lasts_s
        yield self._training(job, at_s, cause)

    def _standing(self, job: str, now_s: float, cause: str) -> Change:
        gpus, use = self.seats.num_held(job), Use.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION
        return Change(job=job, gpus=gpus, from_s=now_s, flops=0.0, use=use, cause=cause)

    def _training(self, job: str, from_s: float, cause: str) -> Change:
        gpus = self.seats.num_held(job)
        return Change(job=job, gpus=gpus, from_s=from_s, flops=self.jobs[job].flops(gpus), cause=cause)


EQUALLY, WEIGHTED, SIZED = SharedOut(name="equally"), SharedOut(name="weighted"), SharedOut(name="sized")
