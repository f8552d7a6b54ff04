"""How the demo tells what happened: as one JSON object, or as tables for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, PlanState
from unicron_lib.domain.failures import severity_name
from unicron_lib.domain.timeline import timing
from unicron_lib.local.checks import Check, loss_curve
from unicron_lib.local.site import Site
from unicron_lib.report import clock, headline

PLAIN_WIDTH = 130
"""Columns where the output is no terminal."""


def as_object(
    state: ClusterState, site: Site, checks: Sequence[Check], references: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The object of `unicron demo --json`: `incidents` are the failures, `changes` the planned ones."""
    incidents = [_incident(state, it) for it in _told(state)]
    return {
        "ok": all(check.ok for check in checks),
        "incidents": [it for it in incidents if it["severity"] != severity_name(None)],
        "changes": [it for it in incidents if it["severity"] == severity_name(None)],
        "jobs": [_job(site, name, references[name]) for name in sorted(state.jobs)],
        "checks": [asdict(check) for check in checks],
        "ui_url": site.ui_url,
    }


def _told(state: ClusterState) -> list[Incident]:
    kept = (it for it in state.incidents.values() if it.status is not IncidentStatus.MERGED)
    return sorted(kept, key=lambda it: it.opened_at)


def _incident(state: ClusterState, incident: Incident) -> dict[str, Any]:
    return {
        "id": incident.id,
        "kind": incident.kind,
        "severity": severity_name(incident.severity),
        "about": headline(incident),
        **asdict(timing(state, incident)),
        "plan": incident.plan,
        "reason": incident.note,
    }


def _job(site: Site, name: str, reference: Sequence[float]) -> dict[str, Any]:
    curve = loss_curve(site.run_dir, name)
    last = max(curve, default=-1)
    return {
        "job": name,
        "iterations": last + 1,
        "final_loss": curve.get(last),
        "reference_loss": reference[-1] if reference else None,
    }


def show(state: ClusterState, site: Site, checks: Sequence[Check]) -> None:
    """Timeline, plans and checks as tables on stdout."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(_timeline(state), _plans(state))
    for progress in _by_time(state):
        console.print(f"{progress.plan.id}: {progress.plan.reason}", highlight=False)
    console.print(_checks(checks))
    console.print(f"Prefect UI: {site.ui_url}", highlight=False)
    held = sum(check.ok for check in checks)
    console.print(f"{held} of {len(checks)} claims held", style="green" if held == len(checks) else "bold red")


def _timeline(state: ClusterState) -> Table:
    table = Table(title="What happened", title_justify="left")
    for column in ("at (UTC)", "incident", "about", "severity", "seen", "decided", "moved", "first iteration", "redone"):
        table.add_column(column)
    for it in _told(state):
        took = timing(state, it)
        seconds = (took.detection_s, took.decision_s, took.transition_s, took.first_iteration_s)
        cells = ("-" if value is None else f"{value:.2f} s" for value in seconds)
        again = str(took.lost_iterations) if it.is_failure else "-"
        table.add_row(clock(it.opened_at), it.kind, headline(it), severity_name(it.severity), *cells, again)
    return table


def _plans(state: ClusterState) -> Table:
    table = Table(title="Plans", title_justify="left")
    for column in ("plan", "kind", *sorted(state.jobs), "gain (FLOP)", "gap", "method", "solved in"):
        table.add_column(column)
    for progress in _by_time(state):
        plan = progress.plan
        sizes = (str(plan.gpus.get(job, "-")) for job in sorted(state.jobs))
        gain = f"{plan.gain:.3g}" if plan.gain else "-"
        table.add_row(plan.id, plan.kind, *sizes, gain, f"{plan.gap:.1%}", plan.method, f"{plan.solve_s * 1e3:.0f} ms")
    return table


def _by_time(state: ClusterState) -> list[PlanState]:
    return sorted(state.plans.values(), key=lambda it: it.decided_at)


def _checks(checks: Sequence[Check]) -> Table:
    table = Table(title="Claims", title_justify="left")
    for column in ("", "claim", "detail"):
        table.add_column(column)
    for check in checks:
        table.add_row("ok" if check.ok else "FAILED", check.claim, check.detail)
    return table
