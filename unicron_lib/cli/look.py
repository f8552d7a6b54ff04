"""`unicron status`, `jobs`, `incidents`, `explain`: what is, and why, read off the journal and the controller."""

import asyncio
import time
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron_lib.cli.options import AsJson, console, print_json
from unicron_lib.cli.target import Target, find_target
from unicron_lib.errors import ControllerError, UserError

if TYPE_CHECKING:
    from rich.table import Table

    from unicron_lib.controller.views import JobProgress
    from unicron_lib.domain.cluster import ClusterState, Incident
    from unicron_lib.domain.jobs import JobState


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False, as_json: AsJson = False
) -> None:
    """Nodes, jobs and open incidents."""
    target = find_target()
    if as_json:
        state = read_state(target)
        rows = {"nodes": node_rows(state), "jobs": job_rows(state, _live(target)), "incidents": incident_rows(state)}
        print_json({**rows, "ui_url": target.ui_url, "journal_seq": state.seq, "breaker_since": state.breaker_since})
    elif watch:
        _watch(target)
    else:
        print_tables(*_screen(target))


def jobs(as_json: AsJson = False) -> None:
    """The jobs, where they run and how far they are."""
    target = find_target()
    rows = job_rows(read_state(target), _live(target))
    print_json({"jobs": rows}) if as_json else print_tables(table_of("jobs", rows))


def incidents(as_json: AsJson = False) -> None:
    """All incidents, the newest last."""
    rows = incident_rows(read_state(find_target()))
    print_json({"incidents": rows}) if as_json else print_tables(table_of("incidents", rows))


def explain(
    incident: Annotated[str, typer.Argument(help="An incident's id, or `last`.")] = "last", as_json: AsJson = False
) -> None:
    """What happened, what was decided, and why."""
    from unicron_lib.journal import dump_state
    from unicron_lib.report import incident_markdown

    state = read_state(find_target())
    name = _find(state, incident)
    if as_json:
        dumped: Any = dump_state(state)
        print_json({"incident": dumped["incidents"][name], "plan": dumped["plans"].get(state.incidents[name].plan)})
        return
    from rich.markdown import Markdown

    console().print(Markdown(incident_markdown(state, name)))


def _find(state: "ClusterState", wanted: str) -> str:
    if wanted == "last" and state.incidents:
        whole = (it for it in state.incidents.values() if it.merged_into is None)
        return max(whole, key=lambda it: it.opened_at).id
    matches = [name for name in state.incidents if name.startswith(wanted)]
    if len(matches) != 1:
        known = ", ".join(list(state.incidents)[-5:]) or "none"
        raise UserError(f"{len(matches)} incidents match {wanted!r}: the newest are {known}")
    return matches[0]


def read_state(target: Target) -> "ClusterState":
    """The folded journal."""
    return target.journal().refresh()


def _live(target: Target) -> "dict[str, JobProgress]":

    async def ask() -> "dict[str, JobProgress]":
        async with target.client() as client:
            return {live.job: live for live in await client.progress()}

    try:
        return asyncio.run(ask())
    except ControllerError:
        return {}


def node_rows(state: "ClusterState") -> list[dict[str, Any]]:
    """A row a node; `until` is when a node that leaves is gone."""
    from unicron_lib.domain.cluster import NodeStatus
    from unicron_lib.report import clock

    held: dict[str, list[str]] = {}
    for name, job in state.jobs.items():
        for node in job.nodes:
            held.setdefault(node, []).append(name)
    return [
        {
            "node": name,
            "status": str(node.status),
            "gpus": node.num_gpus,
            "address": node.address,
            "jobs": ", ".join(sorted(held.get(name, []))),
            "until": f"{clock(node.leaves_at)} UTC" if node.status is NodeStatus.LEAVING else "",
            "reason": node.reason,
            "notes": "; ".join(f"{code}: {text}" for code, text in sorted(node.notes.items())),
        }
        for name, node in sorted(state.nodes.items())
    ]


def job_rows(state: "ClusterState", live: "dict[str, JobProgress]") -> list[dict[str, Any]]:
    """A row a job; `iteration` counts the iterations that are done."""
    from unicron_lib.domain.skipping import told

    rows = []
    for name, job in sorted(state.jobs.items()):
        now = live.get(name)
        done = now.iteration + 1 if now else max(job.failed_at or 0, 0)
        rows.append(
            {
                "job": name,
                "status": str(job.status),
                "gpus": job.gpus,
                "layout": _layout(job),
                "nodes": ", ".join(job.assignment.nodes) if job.assignment else "",
                "iteration": done,
                "train_iters": None if job.spec.command else job.spec.train_iters,
                "loss": round(now.loss, 4) if now and isfinite(now.loss) else None,
                "weight": job.spec.weight,
                "generation": job.generation,
                "slow": "; ".join(f"{who} {how}" for who, how in sorted(job.stragglers.items())),
                "loss_spike": job.loss_spike,
                "batches_left_out": told(job.skipped),
                "reason": job.reason,
            }
        )
    return rows


def _layout(job: "JobState") -> str:
    """Told where it is not plain: of cut replicas, and where there is a choice."""
    layout = job.assignment.layout if job.assignment else None
    if layout is None or (layout.replica_size == 1 and not job.spec.parallel_layouts):
        return ""
    return f"{layout.shape} dp={layout.dp}"


def incident_rows(state: "ClusterState") -> list[dict[str, Any]]:
    """A row an incident, oldest first."""
    return [_incident_row(state, it) for it in sorted(state.incidents.values(), key=lambda it: it.opened_at)]


def _incident_row(state: "ClusterState", incident: "Incident") -> dict[str, Any]:
    from unicron_lib.domain.failures import severity_name
    from unicron_lib.domain.timeline import timing
    from unicron_lib.report import clock, headline

    took = timing(state, incident)
    return {
        "id": incident.id,
        "at": clock(incident.opened_at),
        "kind": incident.kind,
        "severity": severity_name(incident.severity),
        "status": str(incident.status),
        "about": headline(incident),
        "seen": incident.count or None,
        "detection_s": took.detection_s,
        "decision_s": took.decision_s,
        "transition_s": took.transition_s,
        "first_iteration_s": took.first_iteration_s,
        "lost_iterations": took.lost_iterations,
        "reason": incident.note,
    }


def _screen(target: Target) -> "list[Table | str]":
    state = read_state(target)
    unfinished = [row for row in incident_rows(state) if row["status"] in {"open", "planned"}]
    parts: list[Table | str] = [nodes_table(state), table_of("jobs", job_rows(state, _live(target)))]
    if unfinished:
        parts.append(table_of("open incidents", unfinished))
    return [breaker_banner(state.breaker_since, state.breaker_reason), *parts] if state.breaker_since is not None else parts


def breaker_banner(since: float, reason: str) -> str:
    """What a person has to know, and to do, once the breaker has tripped."""
    from unicron_lib.report import clock

    return (
        f"[bold red]THE BREAKER TRIPPED at {clock(since)} UTC[/]: {reason or 'too many nodes were to be isolated at once'}. "
        "None is isolated any more; jobs go on. See `unicron incidents`, mend what told of them, then "
        "`unicron nodes --reset-breaker`; with `--false-alarm` the nodes that it held back are left alone"
    )


def nodes_table(state: "ClusterState") -> "Table":
    """The nodes; why, where one is not ready."""
    return table_of("nodes", node_rows(state), hidden=frozenset())


def table_of(title: str, rows: list[dict[str, Any]], *, hidden: frozenset[str] = frozenset({"reason"})) -> "Table":
    """A table of `rows` without columns that are empty in all of them, nor reasons: `explain` tells those."""
    from rich.table import Table

    table = Table(title=title if rows else f"no {title}", title_justify="left")
    shown = [key for key in (rows[0] if rows else ()) if key not in hidden and any(row[key] not in {None, ""} for row in rows)]
    for key in shown:
        table.add_column(key.removesuffix("_s"), justify="right" if isinstance(rows[0][key], int | float) else "left")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in shown))
    return table


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def print_tables(*parts: "Table | str") -> None:
    """Tables, and lines between them, on stdout."""
    for part in parts:
        console().print(part)


def _watch(target: Target) -> None:
    from rich.console import Group
    from rich.live import Live

    with Live(refresh_per_second=2) as live:
        while True:
            live.update(Group(*_screen(target)))
            time.sleep(1)
