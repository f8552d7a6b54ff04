"""`unicron bench`: figures as ratios, measured side by side in one run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from unicron_lib.cli.options import AsJson, console, print_json, say

if TYPE_CHECKING:
    from unicron_lib.cli.planner_figures import Figure

group = typer.Typer(help="Measure a part of Unicron on this machine.", no_args_is_help=True)


@group.callback()
def _bench() -> None:
    # with it a single command stays a command of its group
    """Measure a part of Unicron on this machine."""


@group.command()
def planner(as_json: AsJson = False) -> None:
    """Times of allocation, plan table, look-up and placement, with right answers; exit code 1 if a bar is missed."""
    figures = []
    for figure in _figures():
        say(f"measured: {figure.what}")
        figures.append(figure)
    ok = all(figure.ok for figure in figures)
    if as_json:
        print_json({"ok": ok, "figures": [_as_json(figure) for figure in figures]})
    else:
        _show(figures)
    raise typer.Exit(0 if ok else 1)


def _figures() -> "Iterator[Figure]":
    from unicron_lib.cli import planner_figures as measure

    yield measure.cold_process(bar_s=2.5)
    yield measure.allocations(num_jobs=16, num_gpus=128, bar_s=0.01)
    yield measure.allocations(num_jobs=128, num_gpus=4096, largest=128, bar_s=0.05)
    yield measure.allocations(num_jobs=128, num_gpus=32768, step=8, largest=1024, bar_s=0.2)
    yield from measure.tables(num_jobs=128, num_gpus=4096, largest=128, bar_s=1.0, lookup_bar_s=0.001)
    yield measure.placements(num_jobs=16, num_nodes=128, bar_s=0.05)
    yield measure.placements(num_jobs=16, num_nodes=128, nodes_per_rack=16, bar_s=0.05)
    yield from measure.between_pools(num_jobs=24, num_gpus=128, num_pools=3, bar_s=0.05, moving_bar_s=10.0)


def _as_json(figure: "Figure") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(figure) | {"ok": figure.ok}


def _show(figures: "list[Figure]") -> None:
    from rich.table import Table

    table = Table("", "what", title="The planner on this machine")
    for column in ("median", "worst", "of the CPU", "bar"):
        table.add_column(column, justify="right")
    table.add_column("side by side")
    for figure in figures:
        times = (_milliseconds(seconds) for seconds in (figure.median_s, figure.worst_s, figure.cpu_s, figure.bar_s))
        table.add_row("ok" if figure.ok else "MISSED", figure.what, *times, _beside(figure))
    console().print(table)


def _beside(figure: "Figure") -> str:
    wrong = "" if figure.is_right and figure.gap == 0.0 else f"WRONG ANSWER or a gap ({figure.gap:.1e}). "
    return wrong + (f"{figure.ratio:.3g} x the speed of {figure.against}" if figure.ratio else "")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"
