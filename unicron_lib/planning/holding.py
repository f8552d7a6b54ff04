"""Which ranks live on in a plan: with their process, their memory, and what they have done of the iteration under way."""

from collections.abc import Collection, Iterable, Mapping

from unicron_lib.domain.cluster import ClusterState, Incident, PlanState
from unicron_lib.domain.events import Scalar
from unicron_lib.domain.failures import ErrorKind
from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.plans import Assignment, Hold, Layout, Plan, Slot, StepKind

MOST_IN_VAIN = 2
"""After so many failures in a row without a new iteration, a job's processes are worth nothing: it starts with new ones."""

Told = Mapping[str, Scalar]
"""What an agent tells of a rank."""


def hold_of(
    state: ClusterState, plan: Plan, job: JobState, assignment: Assignment | None, *, reachable: Collection[str]
) -> Hold | None:
    """How the ranks of `job`, as it is before the plan, live on in `assignment`; None if none of them does.

    They do on the GPUs that it keeps, on nodes that are `reachable`, unless their state is not to be gone on from (the job goes
    back, or this submission has not begun) or is cut otherwise than in `assignment`, or an attempt with them has failed; of
    commands only one that parks can.
    """
    name = job.spec.job
    if assignment is None or not job.restored or job.rolled_back_to is not None or name in plan.rewinds:
        return None
    if job.spec.command and not job.spec.parks:
        return None
    incidents = [state.incidents[it] for it in plan.incidents]
    if job.stuck_restarts >= MOST_IN_VAIN or _has_failed_before(state, incidents, name):
        return None
    lived = _lived_in(state, name)
    slots = {slot for it in lived for slot in it.slots}
    kept = tuple(sorted(slot for slot in slots.intersection(assignment.slots) if slot.node in reachable))
    if not kept or any(it.layout.shape != assignment.layout.shape for it in lived):
        return None
    is_faulted = any(it.is_failure and name in it.jobs for it in incidents)
    return Hold(kept=kept, abort=is_faulted, condemned=_hung(incidents, job))


def _lived_in(state: ClusterState, name: str) -> list[Assignment]:
    """Where ranks of the job may live: as in the last plan that was carried out to its end, and in all since."""
    found: list[Assignment] = []
    for it in reversed(list(state.plans.values())):
        if own := it.plan.assignment_of(name):
            found.append(own)
        if it.finished_at is not None and _moves(it, name):
            break
    return found


def _moves(it: PlanState, name: str) -> bool:
    return any(step.job == name for step in it.plan.steps)


def _has_failed_before(state: ClusterState, incidents: Iterable[Incident], name: str) -> bool:
    """Whether the job could not be launched, or made no iteration, in an earlier answer to these incidents."""
    told = {failure.id for incident in incidents for failure in incident.failures}
    last = {StepKind.LAUNCH, StepKind.RESUME}
    return any(
        step.job == name and step.kind in last and f"step/{step.id}" in told
        for it in state.plans.values()
        for step in it.plan.steps
    )


def _hung(incidents: Iterable[Incident], job: JobState) -> tuple[int, ...]:
    """The ranks that stand still by themselves, unless all do: then they wait for something that is none of them."""
    found = {
        failure.rank
        for incident in incidents
        for failure in incident.failures
        if failure.is_stall and failure.kind is ErrorKind.TASK_HANG
        if (failure.job, failure.generation) == (job.spec.job, job.generation) and failure.rank is not None
    }
    return tuple(sorted(found)) if len(found) < max(job.gpus, 2) else ()


def memory_of(hold: Hold, ranks: Iterable[Told], assignment: Assignment | None = None) -> dict[str, Scalar] | None:
    """What the ranks that live on have, of all `ranks` that agents tell of after a hold, each with its `node`.

    They live on in `assignment`; without it each rank is a whole replica. None if they have nothing, or not all parts of a
    replica, or if others, which do not live on, are further by more than the iteration under way.
    """
    replica_size = assignment.layout.replica_size if assignment else 1
    seats = {slot: rank % replica_size for rank, slot in enumerate(assignment.slots)} if assignment else {}
    parked = [rank for rank in ranks if rank["state"] == "parked" and iteration_of(rank) >= 0]
    staying = [rank for rank in parked if _slot_of(rank) in hold.kept]
    kept = [it for it in staying if _part_of(it, replica_size) == seats.get(_slot_of(it), _part_of(it, replica_size))]
    iteration = _furthest(kept, replica_size)
    if iteration < 0 or iteration < _furthest(parked, replica_size) - 1:
        return None
    return {
        "source": f"memory of {len(kept)} {'rank' if len(kept) == 1 else 'ranks'}",
        "iteration": iteration,
        "manifest": None,
        "held": len(kept),
        "micro_batches": sum(int(rank["micro_batches"] or 0) for rank in kept if not _part_of(rank, replica_size)),
    }


def whole_replicas(ranks: Iterable[Told], replica_size: int) -> list[tuple[Told, ...]]:
    """Ranks that together have the whole state of an iteration, in the order of their parts of it; the furthest first."""
    alike: dict[tuple[int, int], list[list[Told]]] = {}
    for rank in sorted(ranks, key=lambda rank: int(rank["rank"] or 0)):
        parts = alike.setdefault((iteration_of(rank), int(rank["generation"] or 0)), [[] for _ in range(replica_size)])
        parts[_part_of(rank, replica_size)].append(rank)
    return [
        tuple(its[min(number, len(its) - 1)] for its in alike[key])
        for key in sorted(alike, reverse=True)
        if all(alike[key])
        for number in range(max(map(len, alike[key])))
    ]


def savers(ranks: Collection[Told], layouts: Mapping[int, Layout]) -> list[tuple[Told, ...]]:
    """`whole_replicas` of ranks of several generations, by the layouts of these; one that nobody knows has no parts."""
    generations = sorted({int(rank["generation"] or 0) for rank in ranks}, reverse=True)
    found = [
        group
        for generation in generations
        for group in whole_replicas(
            [rank for rank in ranks if rank["generation"] == generation], layouts.get(generation, Layout()).replica_size
        )
    ]
    return sorted(found, key=lambda group: -iteration_of(group[0]))


def _furthest(ranks: Collection[Told], replica_size: int) -> int:
    """The last iteration of which some of `ranks` have each part, or can have: -1 for none.

    Of a replica that was cut off at the end of an iteration some ranks may have stepped; then the others can, too.
    """
    had = [{iteration_of(rank) for rank in ranks if _part_of(rank, replica_size) == part} for part in range(replica_size)]
    replicas: dict[tuple[Scalar, int], list[int]] = {}
    for rank in ranks:
        key = rank["generation"], int(rank["rank"] or 0) // replica_size
        replicas.setdefault(key, []).append(iteration_of(rank))
    whole = (its for its in replicas.values() if len(its) == replica_size and max(its) - min(its) <= 1)
    return max((*set.intersection(*had), *map(max, whole)), default=-1)


def _slot_of(rank: Told) -> Slot:
    return Slot(str(rank["node"]), int(rank["gpu"] or 0))


def _part_of(rank: Told, replica_size: int) -> int:
    return int(rank["rank"] or 0) % replica_size


def iteration_of(rank: Told) -> int:
    """The last iteration that is complete in a rank's parameters, -1 for none."""
    return int(rank["iteration"] if rank["iteration"] is not None else -1)
