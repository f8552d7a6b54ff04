"""From the state of the cluster and the decision to respond, to a plan: pure, except that it reads a timer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from unicron_lib.domain.actions import Respond
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.plans import Assignment, Layout, Plan, PlanKind, Slot, content_id
from unicron_lib.errors import InfeasibleError
from unicron_lib.planning import (
    alternatives,
    explain,
    failure_rate,
    pooled,
    spares,
    transition,
)
from unicron_lib.planning.allocation import Allocation, NotEnoughGpus, Request, allocate
from unicron_lib.planning.alternatives import Outlook
from unicron_lib.planning.fitting import Fitted, fit
from unicron_lib.planning.placement import FREELY, Rules
from unicron_lib.planning.pool_rules import ALIKE, PoolRules
from unicron_lib.planning.pools import Market
from unicron_lib.planning.reachability import CheckpointFormat
from unicron_lib.planning.scene import ANY_LAYOUT, Measured, Scene, current_slots, is_moving, layout_now, newest_assignment
from unicron_lib.planning.seating import seat
from unicron_lib.planning.transition_cost import DEFAULT, Bandwidths
from unicron_lib.planning.waf import Demand

IN_PLACE = "in place"
"""The method of a plan that needed no allocation."""
NOTHING_MEASURED: Mapping[str, Measured] = MappingProxyType({})


def make_plan(  # noqa: PLR0913 a plan has many sides
    state: ClusterState,
    respond: Respond,
    *,
    measured: Measured,
    measured_by_shape: Mapping[str, Measured] = NOTHING_MEASURED,
    mtbf_gpu_s: float,
    granularity_gpus: int | None = None,
    spare_gpus: int = 0,
    rules: Rules = FREELY,
    pool_rules: PoolRules = ALIKE,
    checkpoint_formats: Mapping[str, CheckpointFormat] = ANY_LAYOUT,
    bandwidths: Bandwidths = DEFAULT,
    outlook: Outlook | None = None,
    time_limit_s: float = 10.0,
    timer: Callable[[], float],
    solve: Callable[[Request], Allocation] | None = None,
) -> Plan:
    """The plan that `respond` asks for.

    `measured` holds FLOP/s by job and number of GPUs, for jobs without a table of their own, `measured_by_shape` by job, shape
    of a replica and number of GPUs for those with a choice of layouts. `mtbf_gpu_s` is what is believed before anything has
    failed; what the cluster has seen corrects it. `spare_gpus` are kept for the next loss,
    as long as no job that must run needs them. With an `outlook` the plan for a node loss has alternatives. With several
    pools, whose prices and limits `pool_rules` has, jobs change pools only if nothing is broken; spares and alternatives
    are for clusters of one pool.
    Placements keep to `rules`; `checkpoint_formats` holds, by job, the format of its newest checkpoint where not any layout
    can load it, and moves are priced by `bandwidths`. `solve` stands in for a fresh solve, as a table does. A reattempt or
    restart keeps every job where it is and asks no solver; if GPUs that it needs are gone, it becomes a reallocation. A job
    that gets no GPUs is paused with a reason. Raises UserError for a throughput that is not finite or negative.
    """
    if respond.kind is not PlanKind.REALLOCATE:
        plan = _in_place(state, respond)
        if plan is not None:
            return plan
    scene = Scene(
        state=state,
        respond=respond,
        measured=measured,
        measured_by_shape=measured_by_shape,
        rules=rules,
        checkpoint_formats=checkpoint_formats,
        bandwidths=bandwidths,
    )
    demands = scene.demands(granularity_gpus or 1)
    seen = failure_rate.observed_mtbf_gpu_s(state, prior_mtbf_gpu_s=mtbf_gpu_s, planning=respond.incidents)
    observed = failure_rate.rounded(seen, prior_mtbf_gpu_s=mtbf_gpu_s)
    request = Request(demands=demands, num_gpus=scene.num_gpus, mtbf_gpu_s=observed)
    wished = spares.held_back(spare_gpus, total_gpus=scene.total_gpus, healthy_gpus=scene.num_gpus)
    if pooled.is_pooled((job.spec for job in scene.jobs.values()), state.nodes.values()):
        offers = scene.pooled_jobs(demands)
        market = pooled.market_of(offers, scene.nodes, home=scene.home, rules=pool_rules, mtbf_gpu_s=observed)
        ask = partial(scene.share_pools, time_limit_s=time_limit_s, timer=timer)
        return _reallocation(scene, _unless_infeasible(market, ask), demands)
    solve = solve or partial(allocate, timer=timer, time_limit_s=time_limit_s)
    share = partial(fit, share=solve, place=scene.place, layouts=scene.layouts)
    fitted, held = _fitted(request, wished, share)
    plan = _reallocation(replace(scene, held_gpus=held), fitted, demands)
    lost = scene.just_lost
    if outlook is None or not lost:
        return plan
    ways = alternatives.of_nodes(request, scene.nodes, lost, outlook, timer=timer)
    return replace(plan, alternatives=ways, reason=plan.reason + alternatives.advice(ways, plan.gpus))


def _fitted(request: Request, held: int, share: Callable[[Request], Fitted]) -> tuple[Fitted, int]:
    """The allocation with its placement and what to say of it, and the spares that it leaves.

    Jobs that must run may use up the spares, and if even that is not enough, they wait as others do.
    """
    try:
        kept = (f"{held} GPUs more are healthy and kept as spares for the next loss",) if held else ()
        return _noted(share(replace(request, num_gpus=request.num_gpus - held)), *kept), held
    except NotEnoughGpus as error:
        if held:
            fitted, _ = _fitted(request, 0, share)
            return _noted(fitted, "No spares are kept: jobs that must run need them"), 0
        anyone = tuple(replace(demand, must_run=False) for demand in request.demands)
        return _noted(share(replace(request, demands=anyone)), f"{error}: jobs that must run wait too"), 0


def _unless_infeasible(market: Market, share: Callable[[Market], Fitted]) -> Fitted:
    try:
        return share(market)
    except InfeasibleError as error:
        free = (replace(offer, demand=replace(offer.demand, must_run=False)) for offer in market.offers)
        return _noted(share(replace(market, offers=tuple(free))), f"{error}: jobs that must run wait too")


def _noted(fitted: Fitted, *notes: str) -> Fitted:
    return replace(fitted, notes=(*notes, *fitted.notes))


def _reallocation(scene: Scene, fitted: Fitted, demands: tuple[Demand, ...]) -> Plan:
    jobs, allocation, placed = scene.jobs, fitted.allocation, fitted.placement.slots
    current = {name: current_slots(job) for name, job in jobs.items()}
    assignments = tuple(
        _next_generation(jobs[name], slots, scene.layout_of(name, len(slots), fitted.layouts))
        for name, slots in placed.items()
        if slots and (name in scene.touched or slots != current[name])
    )
    emptied = {name for name, job in jobs.items() if not placed[name] and job.nodes}
    kept = {name: len(current_slots(job)) for name, job in scene.kept.items()}
    ended = {name for name, job in scene.state.jobs.items() if name not in jobs and name not in kept and job.nodes}
    freed = sorted(ended)
    again = sorted(a.job for a in assignments if a.num_gpus == len(current[a.job]))
    notes = tuple(fitted.layouts.told(it.job, it.num_gpus, layout_now(jobs[it.job])) for it in assignments)
    notes += (f"Starts again at the same size: {', '.join(again)}",) if again else ()
    notes += (f"GPUs are taken from jobs that have ended: {', '.join(freed)}",) if freed else ()
    notes += (f"{', '.join(kept)} stays as it is, with a node that is silent",) if kept else ()
    plan = Plan(
        id="",
        kind=PlanKind.REALLOCATE,
        incidents=scene.respond.incidents,
        attempt=scene.respond.attempt,
        basis_seq=scene.state.seq,
        reason=scene.explain(fitted, demands, notes),
        gpus={**allocation.gpus, **kept},
        assignments=assignments,
        paused=tuple(sorted(emptied)),
        stopped=scene.respond.stop,
        quarantined=scene.respond.quarantine,
        rewinds=scene.respond.rewinds,
        gain=allocation.gain,
        upper_bound=allocation.upper_bound,
        optimal=allocation.optimal,
        method=allocation.method,
        solve_s=allocation.solve_s,
    )
    return _completed(scene.state, plan, freed=freed)


def _in_place(state: ClusterState, respond: Respond) -> Plan | None:
    """The same GPUs, a new generation; None if some of those GPUs are gone.

    What a superseded plan was moving or stopping is carried on: nothing else would.
    """
    healthy = {node.id for node in state.healthy_nodes}.difference(respond.quarantine)
    wanted = {name: job for name, job in sorted(state.jobs.items()) if job.wants_gpus and name not in respond.stop}
    again = {name: current_slots(job) for name, job in wanted.items() if name in respond.faulted or is_moving(job)}
    if any(slot.node not in healthy for slots in again.values() for slot in slots):
        return None
    assignments = tuple(_again(wanted[name], slots) for name, slots in again.items() if slots)
    emptied = {name for name in again if is_moving(wanted[name]) and not again[name]}
    stopped = {name for name in respond.stop if name in state.jobs and state.jobs[name].nodes}
    paused = tuple(sorted(emptied))
    restarted = {assignment.job: assignment.num_gpus for assignment in assignments}
    plan = Plan(
        id="",
        kind=respond.kind,
        incidents=respond.incidents,
        attempt=respond.attempt,
        basis_seq=state.seq,
        reason=explain.restart_reason(cause=respond.reason, restarted=restarted, stopped=sorted(emptied | stopped)),
        gpus={name: len(current_slots(job)) for name, job in wanted.items()},
        assignments=assignments,
        paused=paused,
        stopped=respond.stop,
        quarantined=respond.quarantine,
        rewinds=respond.rewinds,
        method=IN_PLACE,
    )
    return _completed(state, plan, freed=sorted(stopped))


def _again(job: JobState, slots: tuple[Slot, ...]) -> Assignment:
    return _next_generation(job, slots, layout_now(job) or job.spec.layout(len(slots)))


def _next_generation(job: JobState, slots: tuple[Slot, ...], layout: Layout) -> Assignment:
    seated = seat(slots, layout, newest_assignment(job) or job.assignment)
    return Assignment(job=job.spec.job, generation=job.generation + 1, layout=layout, slots=seated)


def _completed(state: ClusterState, plan: Plan, *, freed: Sequence[str]) -> Plan:
    """The plan with its id, which derives from its content, and its steps; `freed` are jobs that have ended."""
    content = (plan.kind, *plan.incidents, plan.attempt, plan.basis_seq, *plan.assignments, plan.paused, sorted(plan.stopped))
    plan = replace(plan, id=content_id("plan", *content))
    return replace(plan, steps=transition.steps(state, plan, (*plan.paused, *freed)))
