"""Make a plan for what is open and journal it."""

import asyncio
import logging
import time

from prefect import task

from tasks.events import emit
from tasks.services import services
from unicron_lib.config import Settings
from unicron_lib.domain.actions import Dismiss, Respond, TripBreaker
from unicron_lib.domain.events import BreakerTripped, IncidentDismissed, PlanDecided, RecoveryCompleted
from unicron_lib.domain.plans import Plan
from unicron_lib.planning.alternatives import Outlook
from unicron_lib.planning.placement import Rules
from unicron_lib.planning.planner import make_plan

log = logging.getLogger("unicron.planning")


@task(name="plan", task_run_name="plan {respond.kind}", persist_result=True)
async def decide_plan(respond: Respond) -> Plan:
    """The plan that answers `respond`, journalled. Raises IllegalTransition if another plan got there first."""
    found = services()
    state = await asyncio.to_thread(found.journal.refresh)
    plan = await asyncio.to_thread(
        make_plan,
        state,
        respond,
        measured={name: job.measured for name, job in state.jobs.items()},
        mtbf_gpu_s=found.settings.mtbf_gpu_s,
        granularity_gpus=found.settings.granularity_gpus or None,
        spare_gpus=found.settings.spare_gpus,
        outlook=_outlook(found.settings),
        rules=Rules(max_jobs_per_node=found.settings.max_jobs_per_node or None),
        time_limit_s=found.settings.solve_limit_s,
        timer=time.perf_counter,
    )
    decided = PlanDecided(id=plan.id, at=time.time(), plan=plan, supersedes=respond.supersedes)
    await asyncio.to_thread(found.journal.append, decided)
    log.info("%s: %s", plan.id, plan.reason)
    return plan


@task(name="complete", task_run_name="complete {plan}", persist_result=True)
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
