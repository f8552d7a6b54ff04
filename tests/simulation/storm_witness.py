"""The witness of a storm, who sees each entry of the journal land, and checks what must hold after each."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from storm_kernel import Kernel

import unicron_lib.journal as production
from unicron_lib.agent.messages import StopRanks
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import BreakerTripped, Event, FailureDetected, JobSubmitted, PlanDecided, StepCompleted
from unicron_lib.domain.jobs import ENDED, JobSpec
from unicron_lib.domain.plans import Plan, PlanKind, StepKind
from unicron_lib.planning.scene import current_slots, is_moving
from unicron_lib.simulation.invariants import broken


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Witness:
    """Folds what has landed, as nobody in the storm can; raises Broken."""

    kernel: Kernel
    state: ClusterState = field(default_factory=ClusterState)
    events: list[Event] = field(default_factory=list)
    ids: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    left_behind: list[str] = field(default_factory=list)
    begins_with: dict[str, int] = field(default_factory=dict)
    tripped_at: int = -1

    def part(self, node: str, command: StopRanks, parked: Mapping[int, int]) -> None:
        """Ranks that are `parked`, by GPU with the generation that they are held for, are about to be ended."""
        for it in self.state.plans.values():
            for step in it.plan.steps:
                if step.kind is StepKind.STOP and step.hold and step.job == command.job:
                    lost = [gpu for gpu in step.hold.gpus_on(node) if parked.get(gpu) == step.generation]
                    if lost and it.is_active:
                        raise Broken(f"{command.step} ends ranks on {node}, GPUs {lost}, which {it.plan.id} wants to keep")

    def see(self, event: Event) -> None:
        self.kernel.tell(f"journal {self.state.seq + 1}: {told(event)}")
        before, self.state = self.state, production.fold(self.state, event)
        self.events.append(event)
        self.ids[event.id] += 1
        self.seen[type(event).__name__] += 1
        if self._left(before):
            self.seen["left as announced"] += 1
        if self.ids[event.id] > 1:
            raise Broken(f"{event.id} is journalled twice")
        if isinstance(event, JobSubmitted) and self.state.jobs[event.spec.job].submission == event.submission:
            self.begins_with[event.spec.job] = self.state.jobs[event.spec.job].generation + 1
        if isinstance(event, BreakerTripped):
            self.tripped_at = self.state.seq
        wrong = broken(before, event, self.state) or _of_failure(event)
        if isinstance(event, PlanDecided):
            wrong = wrong or _of_plan(before, event.plan) or self._isolates_against_the_breaker(before, event.plan)
            self.seen.update(_kinds_of(event.plan))
        if wrong:
            raise Broken(wrong)
        if sum(plan.is_active for plan in self.state.plans.values()) > 1:
            raise Broken("two plans are under way at once")

    def _left(self, before: ClusterState) -> bool:
        """Whether a node that had announced its end is gone, with nothing lost."""
        return any(node.has_left and not before.nodes[name].has_left for name, node in self.state.nodes.items())

    def _isolates_against_the_breaker(self, before: ClusterState, plan: Plan) -> str | None:
        """A plan that was made before the breaker tripped may still land; a person may let isolation pass."""
        let_pass = any(before.incidents[name].held for name in plan.incidents)
        if before.breaker_since is None or let_pass or not plan.quarantined or plan.basis_seq < self.tripped_at:
            return None
        return f"plan {plan.id} isolates {', '.join(sorted(plan.quarantined))} although the breaker has tripped"


def told(event: Event) -> str:
    """One line of a story."""
    match event:
        case PlanDecided(plan=plan):
            over = f", supersedes {event.supersedes}" if event.supersedes else ""
            moves = {a.job: (a.generation, [f"{s.node}/{s.gpu}" for s in a.slots]) for a in plan.assignments}
            return f"{plan.kind} {plan.id} for {', '.join(plan.incidents)}{over}: {moves}, paused {plan.paused}: {plan.reason}"
        case StepCompleted():
            return f"step {event.id} of {event.plan}: {dict(event.result)}"
        case _:
            return str(getattr(event, "failure", event))


def _kinds_of(plan: Plan) -> list[str]:
    """What is rare in a plan and must be seen in some storm."""
    rare = {"rewind": plan.rewinds, "stop": plan.stopped, "hold": any(step.hold for step in plan.steps)}
    return [f"plan with {name}" for name, found in rare.items() if found]


def _of_failure(event: Event) -> str | None:
    """A node that obeys the newest generation only is as it should be."""
    is_refusal = isinstance(event, FailureDetected) and "has been replaced" in event.failure.evidence
    return (
        f"{event.failure.node} is blamed for its refusal of a replaced generation"
        if is_refusal and event.failure.job is None
        else None
    )


def _of_plan(before: ClusterState, plan: Plan) -> str | None:
    checks = (_touched_in_health, _serves_the_ended, _leaves_its_pool, _claims_too_much)
    return next((wrong for check in checks if (wrong := check(before, plan))), None)


def _touched_in_health(before: ClusterState, plan: Plan) -> str | None:
    """Whom a plan moves although nothing of it has failed, it is not under way, and it gets the same GPUs."""
    hit = {job for name in plan.incidents for job in before.incidents[name].jobs}
    for name in {step.job for step in plan.steps} - hit:
        job = before.jobs[name]
        if not is_moving(job) and job.wants_gpus and _stays(before, plan, name):
            return f"plan {plan.id} touches {name}, which is in the best of health and stays where it is"
    return None


def _stays(before: ClusterState, plan: Plan, name: str) -> bool:
    assignment = plan.assignment_of(name)
    return plan.kind is not PlanKind.REALLOCATE or bool(assignment and assignment.slots == current_slots(before.jobs[name]))


def _serves_the_ended(before: ClusterState, plan: Plan) -> str | None:
    served = [it.job for it in plan.assignments if before.jobs[it.job].status in ENDED or it.job in plan.stopped]
    return f"plan {plan.id} gives GPUs to {', '.join(served)}, which has ended" if served else None


def _leaves_its_pool(before: ClusterState, plan: Plan) -> str | None:
    for it in plan.assignments:
        pools = {before.nodes[slot.node].pool for slot in it.slots}
        if not pools <= _pools_of(before.jobs[it.job].spec, pools) or len(pools) > 1:
            return f"plan {plan.id} has {it.job} run in {', '.join(sorted(pools))}"
    return None


def _pools_of(spec: JobSpec, there: set[str]) -> set[str]:
    """The pools that a job may use."""
    return {spec.pool} if spec.pool else set(spec.throughput_by_pool) or there


def _claims_too_much(_: ClusterState, plan: Plan) -> str | None:
    """What is not the optimum says so, and nothing is better than its bound."""
    if plan.kind is not PlanKind.REALLOCATE:
        return None
    slack = 1e-9 * abs(plan.upper_bound) + 1.0
    if plan.gain > plan.upper_bound + slack:
        return f"plan {plan.id} gains {plan.gain:g}, more than its bound {plan.upper_bound:g}"
    if plan.optimal and plan.gain < plan.upper_bound - slack:
        return f"plan {plan.id} is called the optimum, with {plan.gain:g} of {plan.upper_bound:g}"
    return None
