"""The core of the recovery: what to do about what has happened. Pure; the time is an argument, each answer has a reason."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from unicron_lib.domain.actions import Action, Continue, Dismiss, Respond, Rest, TripBreaker, Wait
from unicron_lib.domain.breaker import trips_breaker
from unicron_lib.domain.cluster import ClusterState, Incident, NodeStatus, PlanState
from unicron_lib.domain.events import Event
from unicron_lib.domain.failures import Severity
from unicron_lib.domain.jobs import ENDED
from unicron_lib.domain.journal import fold
from unicron_lib.domain.judging import DEFAULT_POLICY, Policy, Verdict, judge
from unicron_lib.domain.launch_checks import check_before_launch
from unicron_lib.domain.leave import ANNOUNCED
from unicron_lib.domain.plans import PlanKind
from unicron_lib.domain.rewinding import rewinds


def on_event(state: ClusterState, event: Event, policy: Policy = DEFAULT_POLICY) -> tuple[ClusterState, Action]:
    """Fold `event` and say what to do next."""
    state = fold(state, event)
    return state, decide(state, event.at, policy)


def decide(state: ClusterState, now: float, policy: Policy = DEFAULT_POLICY) -> Action:
    """What to do at `now` (epoch seconds).

    An unfinished plan goes on unless a new failure, or a node that leaves, touches it. What calls for nothing is dismissed.
    Restarts (SEV2, SEV3) go first and alone: they need no allocation. Everything else that is open shares one new allocation.
    """
    active = state.active_plan
    failures = [incident for incident in state.open_incidents if incident.is_failure]
    if active:
        return _under_way(state, active, failures, now, policy)
    waiting = [wait for incident in failures if (wait := _too_early(state, incident, now, policy))]
    ready = [incident for incident in failures if not _too_early(state, incident, now, policy)]
    verdicts = {incident.id: judge(state, incident, now) for incident in ready}
    if tripped := trips_breaker(state, verdicts, now, policy):
        return TripBreaker(reason=tripped)
    for name, verdict in verdicts.items():
        if verdict.dismiss:
            return Dismiss(incident=name, reason=verdict.reason)
    restarts = [i for i in ready if verdicts[i.id].severity is not Severity.SEV1 and not verdicts[i.id].stop]
    if restarts:
        return _restart(state, restarts, verdicts)
    return _allocate(state, ready, verdicts, waiting[0] if waiting else None, now, policy)


def _allocate(
    state: ClusterState,
    ready: Sequence[Incident],
    verdicts: Mapping[str, Verdict],
    waiting: Wait | None,
    now: float,
    policy: Policy,
) -> Action:
    """One allocation for the failures that are `ready` and all planned changes, once no more of them are to be expected."""
    planned = [incident for incident in state.open_incidents if not incident.is_failure]
    if not ready and (waiting or not planned):
        return waiting or Rest()
    if silent := _silent(state, state.nodes, now, policy):
        return Wait(until=now + 0.5, reason=f"{', '.join(silent)} is silent: a new allocation waits for its verdict")
    newest = max((incident.updated_at for incident in planned), default=now)
    if not ready and newest <= now < newest + policy.settle_s:
        return Wait(until=newest + policy.settle_s, reason="more changes may follow at once")
    check = check_before_launch(state, now, policy.launch_check_s)
    pressing = (*ready, *filter(_is_leave, planned))
    if check and not any(incident.jobs for incident in pressing):  # what concerns a job that trains waits for nothing
        return Wait(until=check.until, reason=f"{', '.join(check.nodes)} are checked before {', '.join(check.jobs)} starts")
    return _reallocate(state, [*ready, *planned], verdicts)


def _under_way(state: ClusterState, active: PlanState, failures: Sequence[Incident], now: float, policy: Policy) -> Action:
    plan = active.plan
    jobs = {step.job for step in plan.steps}
    nodes = {node for step in plan.steps for node in step.nodes}
    touching = [incident for incident in failures if _touches(incident, jobs, nodes)]
    leaves = [incident for incident in state.open_incidents if _is_leave(incident)]
    leaves_it = any(_touches(incident, jobs, nodes) for incident in leaves)
    found = {i.id: judge(state, i, now) for i in touching if not _too_early(state, i, now, policy)}
    verdicts = {name: verdict for name, verdict in found.items() if not verdict.dismiss}  # those can wait
    if not verdicts and not leaves_it:
        return Continue(plan=plan.id, reason=f"plan {plan.id} is under way")
    others = {i.id: judge(state, i, now) for i in failures if i not in touching and not _too_early(state, i, now, policy)}
    verdicts |= {name: verdict for name, verdict in others.items() if not verdict.dismiss}  # else they might wait for ever
    if tripped := trips_breaker(state, verdicts, now, policy):
        return TripBreaker(reason=tripped)
    concerned = [state.incidents[name] for name in (*plan.incidents, *verdicts)]
    grave = any(verdict.severity is Severity.SEV1 or verdict.stop for verdict in verdicts.values())
    if plan.kind is PlanKind.REALLOCATE or grave or leaves_it:
        return _reallocate(state, [*concerned, *leaves], verdicts, supersedes=plan.id)
    return _restart(state, concerned, verdicts, supersedes=plan.id)


def _is_leave(incident: Incident) -> bool:
    return incident.kind == ANNOUNCED


def _touches(incident: Incident, jobs: AbstractSet[str], nodes: AbstractSet[str]) -> bool:
    return incident.node in nodes or bool(jobs & set(incident.jobs))


def _too_early(state: ClusterState, incident: Incident, now: float, policy: Policy) -> Wait | None:
    names = {node for job in incident.jobs if job in state.jobs for node in state.jobs[job].nodes}
    if silent := _silent(state, names, now, policy):
        return Wait(until=now + 0.5, reason=f"{', '.join(silent)} is silent: its verdict may explain {incident.kind}")
    until = incident.opened_at + policy.root_cause_grace_s
    if incident.is_only_echoes and incident.opened_at <= now < until:  # a clock set back must not hold us for long
        return Wait(until=until, reason=f"{incident.kind} is what peers of a failed rank report: its own report may follow")
    until = incident.updated_at + policy.last_word_s
    if incident.root and incident.root.is_last_word and incident.updated_at <= now < until:
        return Wait(until=until, reason=f"{incident.kind} ends the job for good: broken hardware may still explain it")
    until = incident.passes_by
    if incident.updated_at <= now < until:
        return Wait(until=until, reason=f"{incident.kind}: the ranks may go on by themselves, as they do after a short stall")
    return None


def _silent(state: ClusterState, names: Iterable[str], now: float, policy: Policy) -> list[str]:
    """Those of the nodes whose verdict is due; a node that is silent for longer, since its ranks step, is planned around."""
    suspects = (state.nodes[name] for name in names if name in state.nodes and state.nodes[name].status is NodeStatus.SUSPECT)
    return sorted(node.id for node in suspects if node.since <= now < node.since + policy.suspect_s)


def _restart(
    state: ClusterState, incidents: Sequence[Incident], verdicts: Mapping[str, Verdict], supersedes: str | None = None
) -> Respond:
    jobs = sorted({job for i in incidents for job in i.jobs if job in state.jobs and state.jobs[job].status not in ENDED})
    gentle = all(verdicts[i.id].severity is Severity.SEV3 for i in incidents if i.id in verdicts)
    reasons = [verdicts[i.id].reason for i in incidents if i.id in verdicts]
    return Respond(
        kind=PlanKind.REATTEMPT if gentle else PlanKind.RESTART,
        incidents=tuple(i.id for i in incidents),
        attempt=_attempt(state, incidents),
        reason="; ".join(reasons),
        faulted=tuple(jobs),
        rewinds=rewinds(state, incidents),
        supersedes=supersedes,
    )


def _reallocate(
    state: ClusterState, incidents: Sequence[Incident], verdicts: Mapping[str, Verdict], supersedes: str | None = None
) -> Respond:
    reasons = [verdicts[i.id].reason if i.id in verdicts else _planned_reason(state, i) for i in incidents]
    faulted = {job for i in incidents if i.is_failure for job in i.jobs}
    return Respond(
        kind=PlanKind.REALLOCATE,
        incidents=tuple(i.id for i in incidents),
        attempt=_attempt(state, incidents),
        reason="; ".join(dict.fromkeys(reasons)),
        faulted=tuple(sorted(faulted)),
        quarantine={node: why for verdict in verdicts.values() for node, why in verdict.quarantine.items()},
        stop={job: why for verdict in verdicts.values() for job, why in verdict.stop.items()},
        rewinds=rewinds(state, incidents),
        supersedes=supersedes,
    )


def _planned_reason(state: ClusterState, incident: Incident) -> str:
    node = state.nodes.get(incident.node or "")
    if _is_leave(incident) and node and node.status is NodeStatus.LEAVING:
        return f"{node.id} leaves: {node.reason}"
    who = incident.node or ", ".join(incident.jobs)
    found = f" ({incident.launch_check})" if incident.launch_check else ""
    return f"{incident.kind.replace('_', ' ')}: {who}{found}"


def _attempt(state: ClusterState, incidents: Sequence[Incident]) -> int:
    ids = {incident.id for incident in incidents}
    return 1 + sum(1 for plan in state.plans.values() if ids & set(plan.plan.incidents))
