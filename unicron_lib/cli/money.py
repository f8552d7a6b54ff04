"""The parts of `unicron plan` that are about money: alternatives to a plan, and scenarios with pools."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer


def show_alternatives(alternatives: Sequence[Mapping[str, Any]]) -> None:
    """What else could be done about a lost node, the best marked, and a sentence on each."""
    from rich.table import Table

    from unicron_lib.cli.options import console

    table = Table("", "a node is lost:", title="alternatives, until the next failure", title_justify="left")
    for column in ("FLOP", "dollars", "worth less dollars"):
        table.add_column(column, justify="right")
    for it in alternatives:
        value = "-" if it["value_dollars"] is None else f"{it['value_dollars']:.2f}"
        table.add_row("*" if it["best"] else "", it["kind"], f"{it['flop']:.4g}", f"{it['dollars']:.2f}", value)
    screen = console()
    screen.print(table)
    for it in sorted(alternatives, key=lambda it: not it["best"]):
        mark = "Best: " if it["best"] else ""
        screen.print(f"{mark}{it['kind']}: {it['reason']}.", highlight=False, markup=False, soft_wrap=True)


def plan_pools(document: Mapping[Any, Any], *, lose: Sequence[str], finish: Sequence[str], as_json: bool) -> None:
    """The answer to a scenario with pools, of which `lose` have lost a node.

    Raises UserError for a broken one, InfeasibleError if the jobs that must run do not fit.
    """
    from unicron_lib.planning import pool_scenario

    asked = pool_scenario.changed(document, lose=lose, finish=finish)
    answer = pool_scenario.answer(asked, timer=time.perf_counter)
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        _show_pools(asked, answer)


def _show_pools(asked: Any, answer: Mapping[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from unicron_lib.cli.options import console

    table = Table("job", "tenant", "before", "after", title="GPUs by pool", title_justify="left")
    for job in sorted(asked.jobs, key=lambda job: job.job):
        before = f"{job.current_gpus} in {job.pool}" if job.current_gpus else "-"
        count = answer["gpus"][job.job]
        after = f"{count} in {answer['pool'][job.job]}" if count else "-"
        table.add_row(escape(job.job), escape(job.tenant), escape(before), escape(after))
    screen = console()
    screen.print(table)
    screen.print(answer["reason"], highlight=False, markup=False, soft_wrap=True)
    screen.print(f"Gain {answer['gain']:.4g} FLOP until the next failure, {answer['solve_s']:.2f} s", highlight=False)
