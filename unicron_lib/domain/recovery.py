"""The core of the recovery: what to do about what has happened. Pure; the time is an argument, each answer has a reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from unicron_lib.domain.actions import Action, Continue, Respond, Rest, Wait
from unicron_lib.domain.cluster import ClusterState, Incident, NodeStatus, PlanState
from unicron_lib.domain.events import Event
from unicron_lib.domain.failures import ErrorKind, Failure, Severity
from unicron_lib.domain.jobs import ENDED, JobState
from unicron_lib.domain.journal import fold
from unicron_lib.domain.plans import PlanKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Patience, in seconds, and the breaker against mass isolation (share of all nodes within a window)."""

    root_cause_grace_s: float = 1.0
    settle_s: float = 1.0
    breaker_share: float = 0.5
    breaker_window_s: float = 300.0


DEFAULT_POLICY = Policy()
BLAMELESS = frozenset(
    {
        *(ErrorKind.LOSS_ANOMALY, ErrorKind.STORAGE_ERROR, ErrorKind.DATALOADER_ERROR, ErrorKind.OUT_OF_MEMORY),
        *(ErrorKind.USER_ERROR, ErrorKind.STRAGGLER),
    }
)
"""Kinds for which no node is isolated, however often they come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one incident calls for: how far to go, which nodes to isolate, which jobs to give up, and why."""

    severity: Severity
    reason: str
    quarantine: dict[str, str]
    stop: dict[str, str]


def on_event(state: ClusterState, event: Event, policy: Policy = DEFAULT_POLICY) -> tuple[ClusterState, Action]:
    """Fold `event` and say what to do next."""
    state = fold(state, event)
    return state, decide(state, event.at, policy)


def decide(state: ClusterState, now: float, policy: Policy = DEFAULT_POLICY) -> Action:
    """What to do at `now` (epoch seconds).

    An unfinished plan goes on unless a new failure touches it. Restarts (SEV2, SEV3) go first and alone: they need no
    allocation. Everything else that is open shares one new allocation.
    """
    active = state.active_plan
    failures = [incident for incident in state.open_incidents if incident.is_failure]
    if active:
        return _under_way(state, active, failures, now, policy)
    waiting = [wait for incident in failures if (wait := _too_early(state, incident, now, policy))]
    ready = [incident for incident in failures if not _too_early(state, incident, now, policy)]
    verdicts = {incident.id: judge(state, incident, now, policy) for incident in ready}
    restarts = [i for i in ready if verdicts[i.id].severity is not Severity.SEV1 and not verdicts[i.id].stop]
    if restarts:
        return _restart(state, restarts, verdicts)
    planned = [incident for incident in state.open_incidents if not incident.is_failure]
    if not ready and (waiting or not planned):
        return waiting[0] if waiting else Rest()
    suspects = [node.id for node in state.nodes.values() if node.status is NodeStatus.SUSPECT]
    if suspects:
        return Wait(until=now + 0.5, reason=f"{', '.join(suspects)} is silent: a new allocation waits for its verdict")
    newest = max((incident.updated_at for incident in planned), default=now)
    if not ready and newest <= now < newest + policy.settle_s:
        return Wait(until=newest + policy.settle_s, reason="more changes may follow at once")
    return _reallocate(state, [*ready, *planned], verdicts)


def _under_way(state: ClusterState, active: PlanState, failures: Sequence[Incident], now: float, policy: Policy) -> Action:
    plan = active.plan
    jobs = {step.job for step in plan.steps}
    nodes = {node for step in plan.steps for node in step.nodes}
    touching = [incident for incident in failures if incident.node in nodes or jobs & set(incident.jobs)]
    ready = [incident for incident in touching if not _too_early(state, incident, now, policy)]
    if not ready:
        return Continue(plan=plan.id, reason=f"plan {plan.id} is under way")
    verdicts = {incident.id: judge(state, incident, now, policy) for incident in ready}
    earlier = [state.incidents[name] for name in plan.incidents]
    grave = any(verdict.severity is Severity.SEV1 or verdict.stop for verdict in verdicts.values())
    if plan.kind is PlanKind.REALLOCATE or grave:
        return _reallocate(state, [*earlier, *ready], verdicts, supersedes=plan.id)
    return _restart(state, [*earlier, *ready], verdicts, supersedes=plan.id)


def _too_early(state: ClusterState, incident: Incident, now: float, policy: Policy) -> Wait | None:
    names = {node for job in incident.jobs if job in state.jobs for node in state.jobs[job].nodes}
    suspects = sorted(name for name in names if name in state.nodes and state.nodes[name].status is NodeStatus.SUSPECT)
    if suspects:
        return Wait(until=now + 0.5, reason=f"{', '.join(suspects)} is silent: its verdict may explain {incident.kind}")
    until = incident.opened_at + policy.root_cause_grace_s
    if incident.is_only_echoes and incident.opened_at <= now < until:  # a clock set back must not hold us for long
        return Wait(until=until, reason=f"{incident.kind} is what peers of a failed rank report: its own report may follow")
    return None


def judge(state: ClusterState, incident: Incident, now: float, policy: Policy = DEFAULT_POLICY) -> Verdict:
    """Severity of an incident with escalation: each failure without a new iteration raises it by one, then the job stops.

    A node is isolated for a failure of its hardware, and when restarts on it did not help, unless the kind says that
    the node is not to blame.
    """
    root = incident.root
    assert root is not None
    assert incident.severity is not None
    told = f"{root.kind} on {_where(incident)}"
    job = state.jobs.get(root.job or "")
    if root.kind is ErrorKind.NODE_LOST:
        return Verdict(severity=Severity.SEV1, reason=f"{told} (SEV1)", quarantine={}, stop={})
    if root.job and root.kind is ErrorKind.USER_ERROR:
        stop = {root.job: f"an error in the job's own code or data: {_headline(root.evidence)}"}
        return Verdict(severity=Severity.SEV1, reason=f"{told}: a restart cannot cure it", quarantine={}, stop=stop)
    if root.job and job and job.stuck_restarts > job.spec.max_restarts:
        stop = {root.job: f"{job.stuck_restarts} failures in a row without a new iteration, the last one: {told}"}
        return Verdict(severity=Severity.SEV1, reason=f"{told}: the restart budget is spent", quarantine={}, stop=stop)
    severity, reason = _escalated(incident.severity, root, job, told)
    if severity is not Severity.SEV1 or root.node is None:
        return Verdict(severity=severity, reason=reason, quarantine={}, stop={})
    if _breaker_trips(state, now, policy):
        held = f"{reason}; {root.node} stays: the breaker allows no further isolation"
        return Verdict(severity=Severity.SEV2, reason=held, quarantine={}, stop={})
    return Verdict(severity=severity, reason=reason, quarantine={root.node: told}, stop={})


def _escalated(base: Severity, root: Failure, job: JobState | None, told: str) -> tuple[Severity, str]:
    if job is None:
        return Severity.SEV1, f"{told} (SEV1)"
    gravest = Severity.SEV2 if root.kind in BLAMELESS else Severity.SEV1
    severity = min(base, Severity(max(gravest, base - job.stuck_restarts)))
    reason = f"{told} ({severity.name})"
    if severity is not base:
        reason += f", raised from {base.name}: {job.stuck_restarts} attempt(s) brought no new iteration"
    return severity, reason


def _breaker_trips(state: ClusterState, now: float, policy: Policy) -> bool:
    recent = [
        node
        for node in state.nodes.values()
        if node.status is NodeStatus.QUARANTINED and now - node.since < policy.breaker_window_s
    ]
    return len(recent) + 1 > policy.breaker_share * len(state.nodes)


def _where(incident: Incident) -> str:
    root = incident.root
    assert root is not None
    if root.job is None:
        return str(root.node)
    rank = "" if root.rank is None else f" rank {root.rank}"
    return f"{root.job}{rank}" + (f" at {root.node}" if root.node else "")


def _headline(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"


def _restart(
    state: ClusterState, incidents: Sequence[Incident], verdicts: dict[str, Verdict], supersedes: str | None = None
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
        supersedes=supersedes,
    )


def _reallocate(
    state: ClusterState, incidents: Sequence[Incident], verdicts: dict[str, Verdict], supersedes: str | None = None
) -> Respond:
    reasons = [verdicts[i.id].reason if i.id in verdicts else _planned_reason(i) for i in incidents]
    faulted = {job for i in incidents if i.is_failure for job in i.jobs}
    return Respond(
        kind=PlanKind.REALLOCATE,
        incidents=tuple(i.id for i in incidents),
        attempt=_attempt(state, incidents),
        reason="; ".join(dict.fromkeys(reasons)),
        faulted=tuple(sorted(faulted)),
        quarantine={node: why for verdict in verdicts.values() for node, why in verdict.quarantine.items()},
        stop={job: why for verdict in verdicts.values() for job, why in verdict.stop.items()},
        supersedes=supersedes,
    )


def _planned_reason(incident: Incident) -> str:
    who = incident.node or ", ".join(incident.jobs)
    return f"{incident.kind.replace('_', ' ')}: {who}"


def _attempt(state: ClusterState, incidents: Sequence[Incident]) -> int:
    ids = {incident.id for incident in incidents}
    return 1 + sum(1 for plan in state.plans.values() if ids & set(plan.plan.incidents))
