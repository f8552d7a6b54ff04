"""What one incident calls for: the severity, raised where it did not help, the budget, and the breaker."""

from dataclasses import dataclass, field, replace

from unicron_lib.domain.budget import spent
from unicron_lib.domain.cluster import ClusterState, Incident, NodeStatus
from unicron_lib.domain.failures import BLAMELESS, EVIDENCE, ErrorKind, Failure, Severity
from unicron_lib.domain.jobs import JobState
from unicron_lib.domain.rewinding import answer_to, reason_to_give_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Patience, in seconds, and the breaker against mass isolation (share of the nodes within a window).

    What would end a job for good is held for `last_word_s`: what explains it better may still arrive. The verdict on a
    silent node is waited for until it has been silent for `suspect_s`. Nodes lost within `together_s` are lost at once. A first
    start waits for a check of its nodes for `launch_check_s` at most (0: there is none).
    """

    root_cause_grace_s: float = 1.0
    settle_s: float = 1.0
    last_word_s: float = 3.0
    suspect_s: float = 6.0
    together_s: float = 5.0
    breaker_share: float = 0.5
    breaker_window_s: float = 300.0
    launch_check_s: float = 0.0


DEFAULT_POLICY = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one incident calls for: how far to go, which nodes to isolate, which jobs to give up, and why.

    With `dismiss` nothing is done about it.
    """

    severity: Severity
    reason: str
    quarantine: dict[str, str] = field(default_factory=dict)
    stop: dict[str, str] = field(default_factory=dict)
    dismiss: bool = False


def judge(state: ClusterState, incident: Incident, now: float) -> Verdict:
    """Severity of an incident with escalation: each failure without a new iteration raises it by one, then the job stops.

    A node is isolated for a failure of its hardware, when its rank asked for it, and when restarts on it did not help,
    unless the kind says that the node is not to blame, nobody but waiting peers has complained, or the breaker has tripped.
    """
    root = incident.root
    assert root is not None
    told = f"{root.kind} on {where(incident)}"
    if incident.is_of_nodes and (incident.is_only_symptoms or root.kind in EVIDENCE):
        return _nothing_to_do(incident, root, told)
    job = _job_of(state, incident, root)
    why = reason_to_give_up(job, incident.failures) or _reason_to_stop(job, root, now) if job else None
    severity, reason = _escalated(root, job, told)
    if job and (answer := answer_to(job, incident.failures)):
        reason += f": {answer}"
    nodes = {root.node: told} if severity is Severity.SEV1 and root.node and _is_to_blame(root) else {}
    if job and why:
        stop = {job.spec.job: f"{why} ({told})"}
        nodes = nodes if root.verdict == "exclude_and_stop" else {}
        return _held(state, incident, Verdict(severity=Severity.SEV1, reason=f"{told}: {why}", quarantine=nodes, stop=stop))
    return _held(state, incident, Verdict(severity=severity, reason=reason, quarantine=nodes))


def _nothing_to_do(incident: Incident, root: Failure, told: str) -> Verdict:
    if incident.is_only_symptoms:
        reason = f"{told}: nothing but symptoms ({incident.count}), and no cause has shown up"
    else:
        reason = f"{told}: no rank complains"
    return Verdict(severity=root.severity, reason=reason, dismiss=True)


def _job_of(state: ClusterState, incident: Incident, root: Failure) -> JobState | None:
    """The job whose restarts count: the root's, or the worst that suffers from what is no fault of the hardware."""
    if root.job is None and root.severity is Severity.SEV1:
        return None
    names = [root.job] if root.job else sorted({f.job for f in incident.failures if f.job})
    jobs = [state.jobs[name] for name in names if name in state.jobs]
    return max(jobs, key=lambda job: job.stuck_restarts, default=None)


def _reason_to_stop(job: JobState, root: Failure, now: float) -> str | None:
    if root.kind is ErrorKind.USER_ERROR:
        return f"an error in the job's own code or data, which a restart cannot cure: {_headline(root.evidence)}"
    if root.is_last_word:
        return f"the process asked not to be started again: {_headline(root.evidence)}"
    return None if root.kind is ErrorKind.PREEMPTED else spent(job, now)


def _escalated(root: Failure, job: JobState | None, told: str) -> tuple[Severity, str]:
    base = root.severity
    if job is None:
        return Severity.SEV1, f"{told} (SEV1)"
    gravest = Severity.SEV1 if _is_to_blame(root) else Severity.SEV2
    severity = min(base, Severity(max(gravest, base - job.stuck_restarts)))
    reason = f"{told} ({severity.name})"
    if severity is not base:
        reason += f", raised from {base.name}: {job.stuck_restarts} attempt(s) brought no new iteration"
    elif root.verdict:
        reason += f", the process asks for it: {_headline(root.evidence)}"
    return severity, reason


def _is_to_blame(root: Failure) -> bool:
    """Whether the failure, if restarts do not help, is the fault of its node: who complains of others is not to blame."""
    is_own = not root.is_echo or root.job is None or bool(root.verdict)
    return is_own and root.kind not in BLAMELESS and root.kind is not ErrorKind.NODE_LOST


def _held(state: ClusterState, incident: Incident, verdict: Verdict) -> Verdict:
    """The verdict if the breaker, or a person, lets it pass; else ranks that still step, and failed ones, stay there.

    On a node that is lost nothing can stay: its jobs move, but it is not isolated.
    """
    if state.breaker_since is None or incident.held or not verdict.quarantine:
        return verdict
    if all(state.nodes[node].status is NodeStatus.LOST for node in verdict.quarantine):
        return replace(verdict, quarantine={})
    reason = f"{verdict.reason}; {', '.join(verdict.quarantine)} stays: the breaker allows no further isolation"
    severity = verdict.severity if verdict.stop else Severity.SEV2
    return Verdict(severity=severity, reason=reason, stop=verdict.stop, dismiss=incident.is_of_nodes)


def where(incident: Incident) -> str:
    """The rank or the node that the root cause is about."""
    root = incident.root
    assert root is not None
    if root.job is None:
        return str(root.node)
    rank = "" if root.rank is None else f" rank {root.rank}"
    return f"{root.job}{rank}" + (f" at {root.node}" if root.node else "")


def _headline(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else "no message"
