"""The production code in virtual time: the fold of the journal, the decision and the planner, as they run in a cluster."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from unicron_lib.domain.actions import Continue, Dismiss, Respond, Rest, TripBreaker, Wait
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import (
    BreakerTripped,
    Event,
    IncidentDismissed,
    PlanDecided,
    RecoveryCompleted,
    StepCompleted,
)
from unicron_lib.domain.journal import fold
from unicron_lib.domain.judging import DEFAULT_POLICY, Policy
from unicron_lib.domain.plans import Plan, StepKind
from unicron_lib.domain.recovery import decide
from unicron_lib.planning.allocation import Allocation, Request, allocate
from unicron_lib.planning.plan_table import Families
from unicron_lib.planning.planner import make_plan
from unicron_lib.simulation.engine import Violation
from unicron_lib.simulation.invariants import broken

Share = Callable[[Request], Allocation]


def stopped_clock() -> float:
    """The timer of the planner: no time passes while it thinks, so that its answers are the same on any machine."""
    return 0.0


def optimum() -> Share:
    """The production allocation, with what requests have in common kept from one to the next, as plans made ahead do."""
    return Families(lambda request: allocate(request, timer=stopped_clock), timer=stopped_clock).solve


@dataclass(slots=True, kw_only=True)
class Production:
    """A cluster's state, its journal if `keeps_journal`, and what is decided about it."""

    mtbf_gpu_s: float
    share: Share
    keeps_journal: bool = False
    state: ClusterState = field(default_factory=ClusterState)
    journal: list[Event] = field(default_factory=list)

    def tell(self, event: Event) -> None:
        """Fold `event`. Raises Violation if an invariant does not hold afterwards."""
        before, self.state = self.state, fold(self.state, event)
        if self.keeps_journal:
            self.journal.append(event)
        wrong = broken(before, event, self.state)
        if wrong:
            raise Violation(f"{wrong}, after {event}")

    def answer(self, now_s: float, policy: Policy = DEFAULT_POLICY) -> Plan | Wait | TripBreaker | None:
        """The plan that has been decided at `now_s`, until when to wait, that the breaker tripped, or None to go on."""
        while True:
            action = decide(self.state, now_s, policy)
            match action:
                case Rest() | Continue():
                    return None
                case Wait():
                    return action
                case Dismiss(incident=incident, reason=reason):
                    told = f"dismissed/{incident}"
                    self.tell(IncidentDismissed(id=told, at=now_s, incident=incident, reason=reason))
                case TripBreaker(reason=reason):
                    self.tell(BreakerTripped(id=f"tripped/{self.state.seq}", at=now_s, reason=reason))
                    return action
                case Respond():
                    return self._plan(action, now_s)

    def _plan(self, respond: Respond, now_s: float) -> Plan:
        plan = make_plan(
            self.state,
            respond,
            measured={},
            mtbf_gpu_s=self.mtbf_gpu_s,
            timer=stopped_clock,
            solve=self.share,
        )
        self.tell(PlanDecided(id=plan.id, at=now_s, plan=plan, supersedes=respond.supersedes))
        return plan

    def carried_out(self, plan: Plan, jobs: Iterable[str], now_s: float) -> None:
        """All steps of `jobs` are done, and with the last of them the recovery, unless another plan has come between."""
        wanted = set(jobs)
        for step in plan.steps:
            if step.job in wanted and self.state.plans[plan.id].is_active:
                result: Mapping[str, float] = {"first_iteration_at": now_s} if step.kind is StepKind.RESUME else {}
                self.tell(StepCompleted(id=step.id, at=now_s, plan=plan.id, result=result))
        progress = self.state.plans[plan.id]
        if progress.is_active and len(progress.results) == len(plan.steps):
            self.tell(RecoveryCompleted(id=f"completed/{plan.id}", at=now_s, plan=plan.id))
