"""What must hold after every event of the production state, whatever happens (the invariants that a state can show)."""

from dataclasses import replace

from unicron_lib.domain.cluster import ClusterState, NodeStatus
from unicron_lib.domain.events import Event, PlanDecided
from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.plans import Plan, Slot
from unicron_lib.planning.scene import current_slots


def broken(before: ClusterState, event: Event, after: ClusterState) -> str | None:
    """Which invariant `event` has broken, in a sentence; None if all hold."""
    if after.seq != before.seq + 1:
        return f"the journal went from entry {before.seq} to {after.seq}"
    for name, job in after.jobs.items():
        known = before.jobs.get(name)
        if known and job.generation < known.generation:
            return f"the generation of {name} fell from {known.generation} to {job.generation}"
    return _of_plan(before, event.plan, after) if isinstance(event, PlanDecided) else None


def _of_plan(before: ClusterState, plan: Plan, after: ClusterState) -> str | None:
    taken: dict[Slot, str] = {}
    moved = {step.job for step in plan.steps}
    for name, job in after.jobs.items():
        if job.wants_gpus:
            slots = current_slots(job)
            # a plan that leaves a job alone may leave it on a node that is lost: that incident gets a plan of its own
            away = {slot.node for slot in slots if name in moved and after.nodes[slot.node].status is not NodeStatus.READY}
            twice = (slot for slot in slots if slot in taken)
            checks = (
                (  # a job may be submitted anew while the plan is made, and still hold what it had before
                    (name in plan.gpus or name in moved) and plan.gpus.get(name, 0) != len(slots),
                    f"counts {plan.gpus.get(name, 0)} GPUs for {name}, but places {len(slots)}",
                ),
                (bool(slots) and not job.spec.admits(len(slots)), f"gives {name} {len(slots)} GPUs, which its limits forbid"),
                (
                    name not in moved and _is_touched(before.jobs[name], job, goes_back=name in plan.rewinds),
                    f"changes {name}, but has no step for it",
                ),
                (name in moved and job.generation == before.jobs[name].generation, f"moves {name}, but keeps its generation"),
                (any(slot in taken for slot in slots), f"gives {name} the GPUs {list(twice)}, which another job has"),
                (bool(away), f"moves {name} to {', '.join(sorted(away))}, not ready"),
            )
            wrong = next((sentence for fails, sentence in checks if fails), None)
            if wrong:
                return f"plan {plan.id} {wrong}"
            taken.update(dict.fromkeys(slots, name))
    return None


def _is_touched(before: JobState, after: JobState, *, goes_back: bool) -> bool:
    """Whether a plan does anything to a job but count its failures, and tell one that has no GPUs how far it is to go back."""
    if before == after or replace(before, failed_times=after.failed_times) == after:
        return False
    return bool(current_slots(after)) or not goes_back
