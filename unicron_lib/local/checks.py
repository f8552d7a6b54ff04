"""What the demo claims, checked against the journal, the ledgers and an undisturbed reference run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus
from unicron_lib.domain.jobs import JobSpec, JobStatus
from unicron_lib.domain.timeline import timing
from unicron_lib.journal import Entry
from unicron_lib.training.ledger import check_ledger, ledger_directory, read_lineage

LOSS_TOLERANCE = 1e-9
"""Relative, in float64: sums in another order differ by 1e-16 a time and grow over some hundred iterations."""
BARS_S = {"process_exit": 20.0, "node_lost": 30.0}
"""Seconds from the fault to the first new iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One claim and whether it held."""

    claim: str
    ok: bool
    detail: str = ""


def check_journal(state: ClusterState, entries: Sequence[Entry]) -> list[Check]:
    """Every failure journalled once, one completed plan an incident, nothing open."""
    ids = Counter(entry.event.id for entry in entries)
    doubles = [name for name, count in ids.items() if count > 1]
    answered = Counter(name for p in state.plans.values() if p.finished_at is not None for name in p.plan.incidents)
    closed = [i for i in state.incidents.values() if i.status is IncidentStatus.CLOSED]
    unclear = [i.id for i in closed if answered[i.id] != 1 and not passed(i)]
    left = [i.id for i in state.incidents.values() if i.status in {IncidentStatus.OPEN, IncidentStatus.PLANNED}]
    return [
        Check(claim="every event is journalled once", ok=not doubles, detail=", ".join(doubles)),
        Check(claim="one plan an incident", ok=not unclear, detail=", ".join(unclear)),
        Check(claim="no incident is left open", ok=not left, detail=", ".join(left)),
    ]


def passed(incident: Incident) -> bool:
    """Whether it was over by itself, with a note and no plan: on a busy machine ranks do stall for a moment."""
    return incident.status is IncidentStatus.CLOSED and incident.plan is None and bool(incident.note)


def check_samples(run_dir: Path, spec: JobSpec) -> Check:
    """No sample lost or read twice, in the order of an undisturbed run."""
    problems = check_ledger(ledger_directory(run_dir, spec.job), spec)
    claim = f"{spec.job}: each sample consumed once, in order"
    return Check(claim=claim, ok=not problems, detail="; ".join(problems[:3]))


def check_losses(run_dir: Path, spec: JobSpec, reference: Sequence[float]) -> Check:
    """The loss curve is the one of an undisturbed run of the same seed."""
    curve = loss_curve(run_dir, spec.job)
    worst = max((_apart(curve.get(i), value) for i, value in enumerate(reference)), default=float("inf"))
    claim = f"{spec.job}: loss curve as undisturbed"
    return Check(claim=claim, ok=worst <= LOSS_TOLERANCE, detail=f"largest relative difference {worst:.1e}")


def check_incidents(state: ClusterState) -> list[Check]:
    """The two injected faults and nothing else, each healed within its bar."""
    known = (it for it in state.incidents.values() if it.is_failure and it.status is not IncidentStatus.MERGED)
    failures = [it for it in known if not passed(it)]
    found = {it.kind: timing(state, it).first_iteration_s for it in failures}
    told = ", ".join(f"{kind} {'-' if took is None else f'{took:.1f} s'}" for kind, took in found.items())
    within = all((found.get(kind) or float("inf")) <= bar for kind, bar in BARS_S.items())
    return [
        Check(claim="two failures, two incidents", ok=len(failures) == len(found) and set(found) == set(BARS_S), detail=told),
        Check(claim="first new iteration within 20 s of the crash and 30 s of the node loss", ok=within, detail=told),
    ]


def loss_curve(run_dir: Path, job: str) -> dict[int, float]:
    """Loss by iteration, of the generation whose iteration counts."""
    lineage, _ = read_lineage(ledger_directory(run_dir, job))
    return {iteration: entry.loss for iteration, entry in lineage.items()}


def check_ends(state: ClusterState, specs: Sequence[JobSpec]) -> list[Check]:
    """All jobs ran to their last iteration."""
    ends: Mapping[str, JobStatus] = {name: job.status for name, job in state.jobs.items()}
    return [
        Check(claim=f"{spec.job} finished", ok=ends.get(spec.job) is JobStatus.FINISHED, detail=str(ends.get(spec.job)))
        for spec in specs
    ]


def _apart(found: float | None, wanted: float) -> float:
    return float("inf") if found is None else abs(found - wanted) / max(abs(wanted), 1e-12)
