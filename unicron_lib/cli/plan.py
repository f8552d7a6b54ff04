"""`unicron plan`: what the planner would do, offline."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from unicron_lib.cli import money
from unicron_lib.errors import InfeasibleError, UserError

USAGE = 2
INFEASIBLE = 3

File = Annotated[Path, typer.Argument(help="Scenario in YAML or JSON: cluster, jobs, present allocation, what is lost.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Lose = Annotated[
    list[str] | None, typer.Option("--lose", metavar="NODE|N", help="Lose a node of the scenario's `nodes`, or N nodes.")
]
Join = Annotated[int, typer.Option("--join", metavar="N", help="N nodes join; lost ones come back first.")]
Finish = Annotated[list[str] | None, typer.Option("--finish", metavar="JOB", help="A job ends.")]
Launch = Annotated[
    list[Path] | None, typer.Option("--launch", metavar="FILE", help="A job begins: as in a scenario, or a deployment YAML.")
]
Diff = Annotated[Path | None, typer.Option("--diff", metavar="PLAN", help="What differs from a plan that --json printed.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the allocation before and after.")]


def plan(
    file: File,
    as_json: AsJson = False,
    lose: Lose = None,
    join: Join = 0,
    finish: Finish = None,
    launch: Launch = None,
    diff: Diff = None,
    plot: Plot = None,
) -> None:
    """Say who would get which GPUs, and why. Needs no server.

    Exit code 2 for a broken file, 3 if the jobs that must run do not fit.
    """
    from unicron_lib.planning import scenario, scenario_text, whatif

    try:
        document = scenario_text.load(file)
        if isinstance(document, Mapping) and "pools" in document:
            _refuse(join, launch, diff, plot)
            money.plan_pools(document, lose=lose or (), finish=finish or (), as_json=as_json)
            return
        before = scenario.parse(document)
        jobs = [whatif.job_to_launch(path) for path in launch or ()]
        changes: dict[str, Any] = {"lose": lose or (), "join": join, "finish": finish or (), "launch": jobs}
        asked = whatif.changed(before, **changes)
        other = whatif.read_answer(diff) if diff else None
        answer = scenario.answer(asked, timer=time.perf_counter)
        answer["reason"] = whatif.told(**changes) + answer["reason"]
        answer |= {"diff": whatif.difference(other, answer)} if other else {}
        if plot:
            _draw(plot, before, asked, answer)
    except InfeasibleError as error:
        _refuse_infeasible(error, as_json=as_json)
    except UserError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(USAGE) from None
    else:
        if as_json:
            typer.echo(json.dumps(answer))
        else:
            _show(asked, answer)


def _refuse(*options: object) -> None:
    if any(options):
        raise UserError("of a scenario with pools only --lose POOL and --finish JOB can be asked: edit the file for the rest")


def _refuse_infeasible(error: InfeasibleError, *, as_json: bool) -> None:
    if as_json:
        numbers = {key: getattr(error, key, None) for key in ("required", "available")}
        found = {"error": "infeasible", "message": str(error), **numbers}
        typer.echo(json.dumps(found))
    else:
        advice = "Lower a min_gpus, drop a must_run, or add nodes."
        typer.echo(f"Infeasible: {error}. {advice}", err=True)
    raise typer.Exit(INFEASIBLE)


def _draw(path: Path, before: Any, asked: Any, answer: dict[str, Any]) -> None:
    from unicron_lib.planning import picture

    if path.suffix.lower() != ".svg":
        raise UserError(f"{path} cannot be drawn, the picture is an SVG: call it {path.with_suffix('.svg').name}")
    held = {job.job: job.current_gpus for job in before.jobs}
    total = max(before.total_gpus, asked.total_gpus)
    text = picture.draw(held, answer["gpus"], total_gpus=total, num_gpus=asked.num_gpus)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def _show(asked: Any, answer: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from unicron_lib.cli.options import console
    from unicron_lib.planning.scenario import flops_of

    table = Table("job", "weight", title=f"{asked.num_gpus} of {asked.total_gpus} GPUs can be used")
    for column in ("GPUs before", "GPUs after", "FLOP/s before", "FLOP/s after", "layout after"):
        table.add_column(column, justify="right")
    for job in sorted(asked.jobs, key=lambda job: job.job):
        before, after = job.current_gpus, answer["gpus"][job.job]
        known = flops_of(asked, job)
        flops = (f"{known.get(size, 0.0):.3g}" for size in (before, after))
        changed = "[bold]" if before != after else ""
        shape = _layout(answer["layout"].get(job.job))
        table.add_row(escape(job.job), f"{job.weight:g}", str(before), f"{changed}{after}", *flops, shape)
    screen = console()
    screen.print(table)
    screen.print(answer["reason"], highlight=False, markup=False, soft_wrap=True)
    certificate = "optimum" if answer["optimal"] else f"gap {answer['gap']:.2%}"
    told = f"Gain {answer['gain']:.4g} FLOP until the next failure ({certificate}), {answer['solve_s']:.2f} s"
    screen.print(told, highlight=False)
    if "placement" in answer:
        screen.print(_placement(answer), highlight=False, markup=False, soft_wrap=True)
    if "alternatives" in answer:
        money.show_alternatives(answer["alternatives"])
    if "diff" in answer:
        screen.print(_told(answer["diff"]), highlight=False, markup=False, soft_wrap=True)


def _placement(answer: dict[str, Any]) -> str:
    where = (f"{job} {', '.join(f'{node}:{gpus}' for node, gpus in on.items())}" for job, on in answer["placement"].items())
    return f"Where: {'; '.join(where)}. {answer['moved_gpus']} ranks have to be moved."


def _layout(layout: dict[str, int] | None) -> str:
    return " ".join(f"{key}{size}" for key, size in layout.items()) if layout else "-"


def _told(diff: dict[str, Any]) -> str:
    """What differs from the other plan, in a sentence or two."""
    gpus = [f"{job} {_count(then)} -> {_count(now)}" for job, (then, now) in diff["gpus"].items()]
    shapes = [
        f"{job} {_layout(then)} -> {_layout(now)}" for job, (then, now) in diff["layout"].items() if job not in diff["gpus"]
    ]
    changes = [f"GPUs: {', '.join(gpus)}"] if gpus else []
    changes += [f"Layouts: {', '.join(shapes)}"] if shapes else []
    worth = f"Gain {diff['gain']:+.4g} FLOP, {diff['moved_gpus']} GPUs change hands."
    return f"Against the other plan: {'. '.join(changes) or 'the same allocation'}. {worth}"


def _count(gpus: int | None) -> str:
    return "none" if gpus is None else str(gpus)
