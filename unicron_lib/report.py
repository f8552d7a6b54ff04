"""The story of an incident in words, for `unicron explain` and the Prefect UI."""

from datetime import UTC, datetime

from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, PlanState
from unicron_lib.domain.failures import Failure, severity_name
from unicron_lib.domain.plans import Step
from unicron_lib.domain.timeline import timing


def clock(at: float) -> str:
    """A wall clock with milliseconds, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3]


def incident_markdown(state: ClusterState, name: str) -> str:
    """What happened, what was decided and why, as markdown with tables. Raises KeyError for an unknown incident."""
    incident = state.incidents[name]
    if incident.merged_into:
        whole = incident_markdown(state, incident.merged_into)
        return f"{name} turned out to be a part of {incident.merged_into}:\n\n{whole}"
    plan = state.plans.get(incident.plan or "")
    parts = [f"# {incident.kind}: {headline(incident)}", _summary(state, incident), _evidence(incident)]
    parts += [_diagnosis(incident), _parts(state, incident), "" if plan else _without_plan(incident)]
    if plan:
        parts += [f"## Decision\n{plan.plan.reason}", _allocation(state, plan), _alternatives(plan), _steps(plan)]
    return "\n\n".join(part for part in parts if part)


def headline(incident: Incident) -> str:
    """Who is concerned, in a few words."""
    root = incident.root
    if root is None:
        return incident.node or ", ".join(incident.jobs) or "the cluster"
    if root.job is None:
        return str(root.node)
    return root.job + ("" if root.rank is None else f" rank {root.rank}") + (f" at {root.node}" if root.node else "")


def _summary(state: ClusterState, incident: Incident) -> str:
    took = timing(state, incident)
    rows = [
        ("severity", severity_name(incident.severity)),
        ("status", str(incident.status)),
        ("opened", f"{clock(incident.opened_at)} UTC"),
        ("failures seen", str(incident.count)),
        ("seen after", _seconds(took.detection_s)),
        ("decided after", _seconds(took.decision_s)),
        ("transition", _seconds(took.transition_s)),
        ("first new iteration after", _seconds(took.first_iteration_s)),
        ("iterations computed again", str(took.lost_iterations)),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows)


def _evidence(incident: Incident) -> str:
    if not incident.failures:
        return ""
    rows = [_evidence_row(incident, f) for f in sorted(incident.failures, key=lambda failure: failure.seen_at)]
    left_out = incident.count - len(rows)
    told = f"\n\n{left_out} more of them are only counted." if left_out > 0 else ""
    return "## Seen\n| at | kind | is | rank | node | by | evidence |\n|---|---|---|---|---|---|---|\n" + "\n".join(rows) + told


def _evidence_row(incident: Incident, failure: Failure) -> str:
    rank = f"{failure.job or ''} {'' if failure.rank is None else failure.rank}"
    first_line = _cell(failure.evidence.strip().partition("\n")[0])
    cells = (clock(failure.seen_at), failure.kind, _role(incident, failure), rank, failure.node or "", failure.method)
    return f"| {' | '.join(cells)} | {first_line} |"


def _role(incident: Incident, failure: Failure) -> str:
    """Why a failure is in the incident."""
    if failure is incident.root:
        return "the cause"
    return "a consequence" if failure.is_echo else ""


def _diagnosis(incident: Incident) -> str:
    """Why it happened, as the logs tell, and whether the recovery knew; it acts on what it sees itself only."""
    told = incident.diagnosis
    if told is None:
        return ""
    again = "a restart can help" if told.recoverable else "a restart will not help"
    rows = [
        f"**{told.kind}** ({told.source}), confidence {told.confidence:.0%}: {_cell(told.root_cause)}",
        f"- judged so: {_cell(told.reason)}",
        f"- to do: {told.mitigation}; {again}",
        *(f"- shown by `{_cell(it).replace('`', ' ')}`" for it in told.evidence),
    ]
    if told.similar:
        rows.append(f"- like {', '.join(told.similar)}")
    rows += [f"- not read: {_cell(it)}" for it in told.unread]
    if told.kind != incident.kind:
        rows.append(
            f"- the recovery took it for {incident.kind} and was not changed: a diagnosis is for people, nothing acts on it"
        )
    return "## Why, as the logs tell\n" + "\n".join(rows)


def _parts(state: ClusterState, incident: Incident) -> str:
    """The incidents that this one explains."""
    rows = [f"- {it.id}: {it.kind}, {headline(it)}" for it in state.incidents.values() if it.merged_into == incident.id]
    return "## It explains\n" + "\n".join(rows) if rows else ""


def _without_plan(incident: Incident) -> str:
    """Why nothing was, or is yet, done about an incident."""
    if incident.note:
        return f"## Decision\nNothing was done: {incident.note}"
    if incident.status is IncidentStatus.OPEN and incident.root and incident.root.is_last_word:
        return "## Decision\nNone yet: it would end the job for good, and broken hardware may still explain it."
    if incident.may_pass:
        return f"## Decision\nNone before {clock(incident.passes_by)} UTC: the ranks may go on by themselves."
    return ""


def _allocation(state: ClusterState, progress: PlanState) -> str:
    plan = progress.plan
    rows = [
        f"| {job} | {gpus} | {_where(progress, job)} | {state.jobs[job].spec.weight:g} |"
        for job, gpus in sorted(plan.gpus.items())
    ]
    told = f"Gain {plan.gain:.4g} of at most {plan.upper_bound:.4g} FLOP, gap {plan.gap:.2%}, by {plan.method}"
    told = f"{told} in {plan.solve_s * 1e3:.0f} ms." if plan.upper_bound else "No allocation was needed."
    return f"{told}\n\n| job | GPUs | where | weight |\n|---|---|---|---|\n" + "\n".join(rows) if rows else told


def _alternatives(progress: PlanState) -> str:
    """What else could have been done about a lost node; what the plan itself does is to take GPUs where that pays."""
    rows = [
        f"| {'**best** ' if it.best else ''}{it.kind} | {it.flop:.4g} | {it.dollars:.2f} | {_cell(it.reason)} |"
        for it in progress.plan.alternatives
    ]
    return "## Alternatives\n| | FLOP | dollars | |\n|---|---|---|---|\n" + "\n".join(rows) if rows else ""


def _where(progress: PlanState, job: str) -> str:
    assignment = progress.plan.assignment_of(job)
    return "stays" if assignment is None else ", ".join(f"{slot.node}:{slot.gpu}" for slot in assignment.slots)


def _steps(progress: PlanState) -> str:
    rows = [f"| {step.kind} | {step.job} | {_told(progress, step)} |" for step in progress.plan.steps]
    return "## Steps\n| step | job | result |\n|---|---|---|\n" + "\n".join(rows) if rows else ""


def _told(progress: PlanState, step: Step) -> str:
    result = progress.results.get(step.id)
    if result is None:
        return "not done"
    shown = {key: clock(float(value)) if key.endswith("_at") else value for key, value in result.items() if value is not None}
    return _cell(
        ", ".join(f"{key.removesuffix('_at').replace('_', ' ')} {value}" for key, value in shown.items() if value != "")
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _cell(text: str) -> str:
    return " ".join(text.split())[:300].replace("|", "\\|")
