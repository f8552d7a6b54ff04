"""`unicron plan`: what the planner would do, offline."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from unicron_lib.errors import UserError

USAGE = 2
INFEASIBLE = 3


def plan(
    file: Annotated[Path, typer.Argument(help="Scenario in YAML or JSON: cluster, jobs, present allocation, what is lost.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say who would get which GPUs, and why. Needs no server.

    Exit code 2 for a broken file, 3 if the jobs that must run do not fit.
    """
    from unicron_lib.planning import scenario
    from unicron_lib.planning.allocation import NotEnoughGpus

    try:
        asked = scenario.read(file)
        answer = scenario.answer(asked, timer=time.perf_counter)
    except NotEnoughGpus as error:
        _refuse_infeasible(error, as_json=as_json)
    except UserError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(USAGE) from None
    else:
        if as_json:
            typer.echo(json.dumps(answer))
        else:
            _show(asked, answer)


def _refuse_infeasible(error: Any, *, as_json: bool) -> None:
    if as_json:
        found = {"error": "infeasible", "message": str(error), "required": error.required, "available": error.available}
        typer.echo(json.dumps(found))
    else:
        advice = "Lower a min_gpus, drop a must_run, or add nodes."
        typer.echo(f"Infeasible: {error}. {advice}", err=True)
    raise typer.Exit(INFEASIBLE)


def _show(asked: Any, answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("job", "weight", title=f"{asked.num_gpus} of {asked.total_gpus} GPUs can be used")
    for column in ("GPUs before", "GPUs after", "FLOP/s before", "FLOP/s after"):
        table.add_column(column, justify="right")
    for job in sorted(asked.jobs, key=lambda job: job.job):
        before, after = job.current_gpus, answer["gpus"][job.job]
        flops = (job.throughput_flops.get(size, 0.0) for size in (before, after))
        changed = "[bold]" if before != after else ""
        table.add_row(job.job, f"{job.weight:g}", str(before), f"{changed}{after}", *(f"{rate:.3g}" for rate in flops))
    console = Console()
    console.print(table)
    console.print(answer["reason"], highlight=False, soft_wrap=True)
    certificate = "optimum" if answer["optimal"] else f"gap {answer['gap']:.2%}"
    console.print(
        f"Gain {answer['gain']:.4g} FLOP until the next failure ({certificate}), {answer['solve_s']:.2f} s", highlight=False
    )
