"""Make a plan for what is open and journal it."""

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import cache, partial

from prefect import task

from tasks.events import emit
from tasks.services import services
from unicron_lib.config import Settings
from unicron_lib.domain.actions import Dismiss, Respond, TripBreaker
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.events import BreakerTripped, IncidentDismissed, PlanDecided, RebalanceDue, RecoveryCompleted
from unicron_lib.domain.plans import Plan, PlanKind
from unicron_lib.planning.ahead import Solve, Table
from unicron_lib.planning.allocation import allocate
from unicron_lib.planning.alternatives import Outlook
from unicron_lib.planning.placement import Rules
from unicron_lib.planning.planner import make_plan
from unicron_lib.planning.pooled import is_pooled
from unicron_lib.planning.transition_cost import Bandwidths

FORESIGHT_S = 10.0
"""Time for plans that are made ahead; what does not fit in is solved when it happens."""
log = logging.getLogger("unicron.planning")


@task(name="plan", task_run_name="plan {respond.kind}", persist_result=True, result_serializer="json")
async def decide_plan(respond: Respond) -> Plan:
    """The plan that answers `respond`, journalled. Raises IllegalTransition if another plan got there first."""
    found = services()
    state = await asyncio.to_thread(found.journal.refresh)
    plan = await asyncio.to_thread(plan_with, state, respond, table().answer)
    decided = PlanDecided(id=plan.id, at=time.time(), plan=plan, supersedes=respond.supersedes)
    await asyncio.to_thread(found.journal.append, decided)
    log.info("%s: %s", plan.id, plan.reason)
    return plan


@cache
def table() -> Table:
    """Plans made ahead, by and for the process that asks."""
    limit_s = services().settings.solve_limit_s
    return Table(partial(allocate, timer=time.perf_counter, time_limit_s=limit_s), timer=time.perf_counter)


def foresee(state: ClusterState) -> int:
    """Make plans ahead for all that may come next after `state`, until the journal goes on; how many events that were."""
    found, deadline = services(), time.monotonic() + FORESIGHT_S

    def go_on() -> bool:
        return time.monotonic() < deadline and found.journal.state.seq == state.seq

    return table().foresee(state, plan_with, go_on=go_on)


def better_pools(state: ClusterState) -> RebalanceDue | None:
    """The event that has jobs change pools, None unless that pays. Looks at all pools, for up to the solver's time."""
    specs = [job.spec for job in state.jobs.values() if job.wants_gpus]
    if not is_pooled(specs, state.nodes.values()):
        return None
    asked = Respond(kind=PlanKind.REALLOCATE, incidents=(), attempt=1, reason="a look at all pools")
    plan = plan_with(state, asked, table().answer)
    home = {node.id: node.pool for node in state.nodes.values()}
    moving = sorted(it.job for it in plan.assignments if home[it.slots[0].node] not in _pools_of(state, it.job, home))
    if not moving:
        return None
    told = f"{', '.join(moving)} would do better in another pool"
    return RebalanceDue(id=f"rebalance/{plan.id}", at=time.time(), gain=plan.gain, reason=told)


def _pools_of(state: ClusterState, job: str, home: Mapping[str, str]) -> set[str]:
    return {home[node] for node in state.jobs[job].nodes if node in home}


def plan_with(state: ClusterState, respond: Respond, solve: Solve) -> Plan:
    """The plan by the numbers of the settings, its allocation by `solve`."""
    settings = services().settings
    here = {name: job for name, job in state.jobs.items() if state.pool_of(job) in {"", job.measured_in}}
    return make_plan(
        state,
        respond,
        measured={name: job.measured for name, job in here.items()},
        measured_by_shape={name: job.measured_by_shape for name, job in here.items()},
        mtbf_gpu_s=settings.mtbf_gpu_s,
        granularity_gpus=settings.granularity_gpus or None,
        spare_gpus=settings.spare_gpus,
        outlook=_outlook(settings),
        rules=Rules(max_jobs_per_node=settings.max_jobs_per_node or None),
        pool_rules=services().pool_rules,
        bandwidths=Bandwidths(
            replica=settings.replica_bytes_per_s,
            peer_memory=settings.replica_bytes_per_s,  # the same network
            store=settings.store_bytes_per_s,
        ),
        time_limit_s=settings.solve_limit_s,
        timer=time.perf_counter,
        solve=solve,
    )


@task(name="complete", task_run_name="complete {plan}", persist_result=True, result_serializer="json")
async def complete(plan: str) -> None:
    """Journal that all steps of `plan` are done: its incidents are closed."""
    done = RecoveryCompleted(id=f"done/{plan}", at=time.time(), plan=plan)
    await asyncio.to_thread(services().journal.append, done)


@task(name="dismiss", task_run_name="dismiss {action.incident}")
async def dismiss(action: Dismiss) -> None:
    """Journal that nothing is done about an incident. Raises IllegalTransition if a job has failed by now."""
    over = IncidentDismissed(id=f"dismissed/{action.incident}", at=time.time(), incident=action.incident, reason=action.reason)
    journal = services().journal
    await asyncio.to_thread(journal.append, over)
    await emit(over, journal.state)


@task(name="trip-breaker")
async def trip_breaker(action: TripBreaker) -> None:
    """Journal that no node is isolated any more."""
    journal = services().journal
    state = await asyncio.to_thread(journal.refresh)
    tripped = BreakerTripped(id=f"breaker-tripped/{state.seq}", at=time.time(), reason=action.reason)
    if state.breaker_since is None and await asyncio.to_thread(journal.append, tripped):
        log.warning("%s", action.reason)
        await emit(tripped, journal.state)


def _outlook(settings: Settings) -> Outlook | None:
    """What the settings know of repairs and prices; None if they do not know how long a repair takes."""
    if not settings.repair_s:
        return None
    return Outlook(
        repair_s=settings.repair_s,
        replace_s=settings.replace_s,
        node_dollars_per_h=settings.node_dollars_per_h,
        dollars_per_eflop=settings.dollars_per_eflop or None,
    )
