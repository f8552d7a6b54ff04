"""`unicron simulate`: what policies would have earned on a trace of faults."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.cli.options import AsJson, print_json, write_text
from unicron_lib.errors import UserError

if TYPE_CHECKING:
    from unicron_lib.simulation.scenes import Asked

TraceName = Annotated[str, typer.Option("--trace", help="trace-a, trace-b, generated, or a file of a format that is known.")]
PolicyNames = Annotated[
    list[str] | None, typer.Option("--policy", metavar="NAME", help="A policy, or paper, ablations or all; may be repeated.")
]
JobsName = Annotated[str | None, typer.Option("--jobs", help="mixed, case-1 to case-5, fleet-N, a scenario or a job table.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, max=10_000, help="So many traces, one a seed.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The first seed.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, max=100_000, help="Nodes; 16, or those of the file.")]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", min=1, max=1000, help="GPUs of each node.")]
Days = Annotated[float, typer.Option("--days", min=0.01, max=3650, help="Of a generated trace.")]
Rate = Annotated[float, typer.Option("--rate", min=0.001, max=1e6, help="Faults in 1,000 node-days of a generated trace.")]
Mtbf = Annotated[float | None, typer.Option("--mtbf-gpu-s", min=1.0, help="What the planner believes; the trace's own.")]
Price = Annotated[float, typer.Option("--gpu-dollars-h", min=0.0, help="The price of a GPU for an hour.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw WAF over time, ratios, allocations.")]
Save = Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the first trace down: CSV, or .json.")]


def simulate(  # noqa: PLR0913, PLR0917 each is an option
    trace: TraceName,
    policy: PolicyNames = None,
    jobs: JobsName = None,
    seeds: Seeds = 1,
    seed: Seed = 0,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 8,
    days: Days = 30.0,
    rate: Rate = 6.5,
    mtbf_gpu_s: Mtbf = None,
    gpu_dollars_h: Price = 2.0,
    plot: Plot = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Say what policies would have earned on a trace of faults, with the decisions of production. Needs no server."""
    from unicron_lib.simulation import pictures, report, scenes, traces

    if plot and plot.suffix.lower() != ".svg":
        raise UserError(f"{plot} cannot be drawn, the picture is an SVG: call it {plot.with_suffix('.svg').name}")
    asked = scenes.Asked(
        trace=trace,
        jobs=jobs,
        policies=tuple(policy or ("all",)),
        num_nodes=nodes,
        gpus_per_node=gpus_per_node,
        first_seed=seed,
        num_seeds=seeds,
        days=days,
        rate=rate,
        mtbf_gpu_s=mtbf_gpu_s,
        gpu_dollars_h=gpu_dollars_h,
    )
    scene = scenes.build(asked)
    if save:
        first = next(iter(scene.traces.values()))
        write_text(save, traces.to_json(first) if save.suffix.lower() == ".json" else traces.to_csv(first))
    with progress(len(scene.policies) * len(scene.traces), "simulating") as done:
        found = scenes.compared(scene, done)
    answer = report.as_json(scene, found, command=command_of(asked))
    if plot:
        write_text(plot, pictures.draw(found))
    if as_json:
        print_json(answer)
        return
    from unicron_lib.cli.simulate_tables import show

    show(answer)


def command_of(asked: "Asked") -> str:
    """The command that gives the same result."""
    from unicron_lib.simulation.scenes import Asked

    usual = Asked(trace=asked.trace)
    options = {
        "--jobs": "jobs",
        "--seeds": "num_seeds",
        "--seed": "first_seed",
        "--nodes": "num_nodes",
        "--gpus-per-node": "gpus_per_node",
        "--days": "days",
        "--rate": "rate",
        "--mtbf-gpu-s": "mtbf_gpu_s",
        "--gpu-dollars-h": "gpu_dollars_h",
    }
    words = ["unicron", "simulate", "--trace", asked.trace]
    words += [word for name in asked.policies for word in ("--policy", name)] if asked.policies != usual.policies else []
    changed = {option: getattr(asked, key) for option, key in options.items() if getattr(asked, key) != getattr(usual, key)}
    return shlex.join([*words, *(str(word) for pair in changed.items() for word in pair)])


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar on the terminal, if stderr is one; call what it gives after each of `total` parts."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
