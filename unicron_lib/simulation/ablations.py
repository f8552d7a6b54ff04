"""Unicron without one of its ideas at a time, so that the worth of each is seen."""

from dataclasses import replace

from unicron_lib.planning.allocation import Allocation, Request
from unicron_lib.simulation.durations import Transition
from unicron_lib.simulation.production import Share, optimum
from unicron_lib.simulation.unicron import Unicron, UnicronRun


def without_detection() -> Unicron:
    """Failures are found when a collective gives up, a lost node by its connection."""
    return Unicron(name="unicron-without-detection", detection=None)


def without_cost_aware_plan() -> Unicron:
    """The planner takes moves to be free; they are not."""
    return Unicron(name="unicron-without-cost-aware-plan", knows_costs=False)


def without_partial_reuse() -> Unicron:
    """An iteration that a failure interrupts is begun anew."""
    return Unicron(name="unicron-without-partial-reuse", transition=Transition(reuse=False))


def without_nearest_principle() -> Unicron:
    """State comes from the object store alone, with the work since the last save lost."""
    return Unicron(name="unicron-without-nearest-principle", transition=Transition(nearest=False))


def without_multi_job() -> Unicron:
    """Each job keeps to the GPUs that it began with: it shrinks when they are lost, and grows when they are back."""
    return Unicron(name="unicron-without-multi-job", share=_alone)


ABLATIONS = (
    without_detection,
    without_cost_aware_plan,
    without_partial_reuse,
    without_nearest_principle,
    without_multi_job,
)


def _alone(run: UnicronRun) -> Share:
    """Once all have begun, each job is planned for as if the GPUs left to it were a cluster of its own."""
    optimal = optimum()

    def share(request: Request) -> Allocation:
        if not run.first_slots:
            return optimal(request)
        parts: list[Allocation] = []
        left = request.num_gpus
        for demand in request.demands:
            own = min(left, _entitled(run, demand.job))
            parts.append(optimal(replace(request, demands=(demand,), num_gpus=own)))
            left -= sum(parts[-1].gpus.values())
        return Allocation(
            gpus={job: gpus for part in parts for job, gpus in part.gpus.items()},
            gain=sum(part.gain for part in parts),
            upper_bound=sum(part.upper_bound for part in parts),
            gap=0.0,
            optimal=False,
            method="alone",
            solve_s=0.0,
            reason="the best for each job on what is left of the GPUs that it began with",
        )

    return share


def _entitled(run: UnicronRun, job: str) -> int:
    """Of the GPUs that the job began with, those that can be used now."""
    ready = {node.id for node in run.production.state.healthy_nodes}.difference(run.down)
    return sum(slot.node in ready for slot in run.first_slots.get(job, ()))
