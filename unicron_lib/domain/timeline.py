"""How long an incident took, phase by phase, read off the folded journal."""

from dataclasses import dataclass

from unicron_lib.domain.cluster import ClusterState, Incident, PlanState
from unicron_lib.domain.plans import StepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of each phase; None where it has not happened, or where nobody knows when the fault began.

    `detection_s` from the fault to the journal entry of the root cause, `decision_s` from there to the plan,
    `transition_s` to the last step, `first_iteration_s` from the fault (else from its first trace in the journal) to the
    first new iteration of the last affected job. `lost_iterations` had to be computed again, summed over the jobs.
    """

    detection_s: float | None
    decision_s: float | None
    transition_s: float | None
    first_iteration_s: float | None
    lost_iterations: int


def timing(state: ClusterState, incident: Incident) -> Timing:
    """The phases of `incident`."""
    plan = state.plans.get(incident.plan or "")
    began = incident.fault_at
    zero = incident.opened_at if began is None else began
    resumed = [float(at) for at in _results(plan, incident, StepKind.RESUME, "first_iteration_at")]
    return Timing(
        detection_s=None if began is None else incident.updated_at - began,
        decision_s=plan.decided_at - incident.updated_at if plan else None,
        transition_s=plan.finished_at - plan.decided_at if plan and plan.finished_at else None,
        first_iteration_s=max(resumed) - zero if resumed else None,
        lost_iterations=sum(_lost(plan, incident, job) for job in incident.jobs),
    )


def _results(plan: PlanState | None, incident: Incident, kind: StepKind, key: str) -> list[float]:
    if plan is None:
        return []
    steps = [s for s in plan.plan.steps if s.kind is kind and (not incident.jobs or s.job in incident.jobs)]
    values = [plan.results[s.id].get(key) for s in steps if s.id in plan.results]
    return [float(value) for value in values if value is not None]


def _lost(plan: PlanState | None, incident: Incident, job: str) -> int:
    reached = [f.iteration for f in incident.failures if f.job == job and f.iteration is not None]
    if plan is None or not reached:
        return 0
    told = {step.kind: plan.results.get(step.id, {}) for step in plan.plan.steps if step.job == job}
    restored = told.get(StepKind.RESTORE, {}).get("iteration")
    went_on_after = told.get(StepKind.RESUME, {}).get("went_on_after", restored)
    return max(0, max(reached) - int(went_on_after)) if went_on_after is not None else 0
