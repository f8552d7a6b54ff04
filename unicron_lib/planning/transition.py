"""The steps from the present to a plan."""

from collections.abc import Iterable

from unicron_lib.domain.cluster import ClusterState, NodeStatus
from unicron_lib.domain.jobs import JobState, JobStatus
from unicron_lib.domain.plans import STEP_ORDER, Assignment, Plan, Step, StepKind, content_id
from unicron_lib.planning.holding import hold_of

BEFORE_LAUNCH = frozenset({StepKind.DRAIN, StepKind.STOP})


def steps(state: ClusterState, plan: Plan, emptied: Iterable[str]) -> tuple[Step, ...]:
    """The steps of a plan that has its id and assignments, and takes all GPUs of the jobs `emptied` (paused or ended).

    A job that may have live ranks is drained and stopped wherever they may be, as far as they do not live on; one with an
    assignment is then restored, launched and resumed. All jobs go through the `STAGES` together. A step's generation is the new
    one of its job.
    """
    goals: list[tuple[str, int, Assignment | None]] = [(a.job, a.generation, a) for a in plan.assignments]
    goals += [(job, state.jobs[job].generation + 1, None) for job in emptied]
    made = [
        step
        for job, generation, assignment in goals
        for step in _steps_to(state, plan, state.jobs[job], generation, assignment)
    ]
    return tuple(sorted(made, key=lambda step: (STEP_ORDER.index(step.kind), step.job)))


def _steps_to(state: ClusterState, plan: Plan, job: JobState, generation: int, assignment: Assignment | None) -> list[Step]:
    name, hold = job.spec.job, hold_of(state, plan, job, assignment, reachable=_reachable(state, job))
    return [
        Step(
            id=content_id("step", plan.id, kind, name, generation),
            kind=kind,
            job=name,
            generation=generation,
            nodes=nodes,
            hold=hold if kind in BEFORE_LAUNCH else None,
        )
        for kind, nodes in _steps_of(state, job, assignment)
    ]


def _steps_of(state: ClusterState, job: JobState, assignment: Assignment | None) -> list[tuple[StepKind, tuple[str, ...]]]:
    found: list[tuple[StepKind, tuple[str, ...]]] = []
    reachable = _reachable(state, job)
    # the ranks of a finished job have saved their last checkpoint and left
    if reachable and job.status is not JobStatus.FINISHED:
        found.append((StepKind.DRAIN, reachable))
    # also when no node is left to talk to: it is what takes the GPUs from the job and fences its generation
    if job.nodes:
        found.append((StepKind.STOP, reachable))
    if assignment:
        found.append((StepKind.RESTORE, ()))
        found += [(StepKind.LAUNCH, assignment.nodes), (StepKind.RESUME, assignment.nodes)]
    return found


def _reachable(state: ClusterState, job: JobState) -> tuple[str, ...]:
    """Nodes on which ranks of the job may be running and whose agent may still answer."""
    lost = (name for name in job.nodes if name not in state.nodes or state.nodes[name].status is NodeStatus.LOST)
    return tuple(sorted(job.nodes.difference(lost)))
