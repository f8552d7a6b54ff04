"""The part of the fold that follows a plan: decided, carried out step by step, complete."""

from dataclasses import replace

from unicron_lib.domain.budget import answered
from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, NodeStatus, PlanState
from unicron_lib.domain.events import PlanDecided, RecoveryCompleted, StepCompleted
from unicron_lib.domain.jobs import ENDED, JobState, JobStatus
from unicron_lib.domain.plans import Plan, StepKind
from unicron_lib.domain.rewinding import rewound
from unicron_lib.errors import IllegalTransition


def plan_decided(state: ClusterState, event: PlanDecided) -> ClusterState:
    """Raises IllegalTransition beside another plan, or if events have overtaken it."""
    plan = event.plan
    active = state.active_plan
    if active and active.plan.id != event.supersedes:
        raise IllegalTransition(f"plan {plan.id} cannot begin: {active.plan.id} is under way, decided at {active.decided_at}")
    _refuse_outdated(state, event)
    plans = dict(state.plans)
    if active:
        plans[active.plan.id] = replace(active, superseded_by=plan.id)
    plans[plan.id] = PlanState(plan=plan, decided_at=event.at)
    state = replace(state, plans=plans)
    for name in plan.incidents:
        incident = state.incidents[name]
        state = _charged(state, incident, event.at)
        state = state.with_incident(replace(incident, status=IncidentStatus.PLANNED, plan=plan.id, note=plan.reason))
    for name, reason in plan.quarantined.items():
        node = replace(state.nodes[name], status=NodeStatus.QUARANTINED, since=event.at, reason=reason)
        state = state.with_node(node)
    return replace(state, jobs={name: _planned_job(name, job, plan) for name, job in state.jobs.items()})


def _charged(state: ClusterState, incident: Incident, at: float) -> ClusterState:
    """Each failure of a job's own is on its budget once, however often its plan is made anew."""
    root = incident.root
    job = state.jobs.get(root.job or "") if root else None
    if root is None or job is None or incident.status is not IncidentStatus.OPEN:
        return state
    return state.with_job(answered(job, root, at))


def _refuse_outdated(state: ClusterState, event: PlanDecided) -> None:
    """What happened while a plan was being made may have overtaken it: then it is made anew."""
    plan = event.plan
    for name in plan.incidents:
        incident = state.incidents[name]
        taken_over = incident.status is IncidentStatus.PLANNED and incident.plan == event.supersedes
        if incident.status is not IncidentStatus.OPEN and not taken_over:
            raise IllegalTransition(f"plan {plan.id} answers {name}, which is {incident.status} by now")
    for assignment in plan.assignments:
        job = state.jobs[assignment.job]
        if job.status in ENDED or job.generation >= assignment.generation:
            raise IllegalTransition(
                f"plan {plan.id} moves {assignment.job}, which is {job.status}, generation {job.generation}"
            )
        gone = [node for node in assignment.nodes if state.nodes[node].status is not NodeStatus.READY]
        if gone:
            raise IllegalTransition(f"plan {plan.id} puts {assignment.job} on {', '.join(gone)}, no longer ready")


def _planned_job(name: str, job: JobState, plan: Plan) -> JobState:
    generation = max((step.generation for step in plan.steps if step.job == name), default=job.generation)
    if generation > job.generation:
        job = replace(job, generation=generation, left_on=tuple(sorted(job.nodes)), stragglers={}, loss_spike="")
    if job.status in ENDED:
        return job
    if name in plan.stopped:
        return replace(job, status=JobStatus.FAILED, reason=plan.stopped[name])
    if name in plan.rewinds:
        job = rewound(job, plan.rewinds[name])
    if name in plan.paused:
        return replace(job, status=JobStatus.QUEUED, reason="waits for GPUs")
    assignment = plan.assignment_of(name)
    return replace(job, status=JobStatus.RUNNING, pending=assignment, reason="") if assignment else job


def step_completed(state: ClusterState, event: StepCompleted) -> ClusterState:
    """Raises IllegalTransition for a step that nobody decided."""
    plan = state.plans.get(event.plan)
    step = next((s for s in plan.plan.steps if s.id == event.id), None) if plan else None
    if plan is None or step is None:
        raise IllegalTransition(f"step {event.id} of plan {event.plan} is done, but no such step was ever decided")
    results = {**plan.results, step.id: event.result}
    state = state.with_plan(replace(plan, results=results))
    job = state.jobs[step.job]
    if not plan.is_active:
        return state
    if step.kind is StepKind.STOP:
        return state.with_job(replace(job, assignment=None, left_on=()))
    is_of_an_earlier_submission = step.generation < job.begins_with
    if isinstance(reached := event.result.get("iteration"), int) and not is_of_an_earlier_submission:
        job = replace(job, iteration=reached)
    if step.kind is StepKind.LAUNCH:
        job = replace(job, assignment=job.pending)
        if not is_of_an_earlier_submission:  # before, ranks may live that know nothing of where it begins, or goes back to
            job = replace(job, restored=True, rolled_back_to=None)
    return state.with_job(job)


def recovery_completed(state: ClusterState, event: RecoveryCompleted) -> ClusterState:
    """Raises IllegalTransition unless the plan is under way and all its steps are done."""
    plan = state.plans.get(event.plan)
    if plan is None or not plan.is_active:
        raise IllegalTransition(f"plan {event.plan} is complete, but it is not the one under way ({state.active_plan})")
    missing = [step.id for step in plan.plan.steps if step.id not in plan.results]
    if missing:
        raise IllegalTransition(f"plan {event.plan} is complete, but its steps {', '.join(missing)} are not done")
    state = state.with_plan(replace(plan, finished_at=event.at))
    for name in plan.plan.incidents:
        incident = replace(state.incidents[name], status=IncidentStatus.CLOSED, closed_at=event.at)
        state = state.with_incident(incident)
    moved = {step.job for step in plan.plan.steps}
    jobs = {name: replace(job, pending=None) if name in moved else job for name, job in state.jobs.items()}
    return replace(state, jobs=jobs)
