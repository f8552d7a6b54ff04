"""`unicron paper`: the figures of the papers, from the production code, as tables and pictures."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.cli.options import say, write_text
from unicron_lib.cli.simulate import progress
from unicron_lib.errors import UserError

if TYPE_CHECKING:
    from unicron_lib.simulation.scenes import Scene
    from unicron_lib.simulation.tables import Table

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Where tables (Markdown, JSON) and pictures (SVG) go.")]
Seeds = Annotated[int, typer.Option("--seeds", min=2, max=1000, help="Traces of each kind.")]
TraceFile = Annotated[
    list[str] | None, typer.Option("--trace", metavar="FILE", help="A trace of yours is compared, too; may be repeated.")
]

TITLE = "The papers' figures, from this code"
INTRODUCTION = (
    "Made by `{command}`. Simulated figures come from the decisions, the incidents and the planner of production; only clock, "
    "faults and durations are modelled. Inputs that were fitted to a published figure are named beside it: there, agreement "
    "is no evidence."
)


def paper(folder: Folder = Path("results"), seeds: Seeds = 20, trace: TraceFile = None) -> None:
    """Write the figures of the Unicron paper and others into a directory, beside what was published."""
    from unicron_lib.simulation import tables
    from unicron_lib.simulation.scenes import Asked, build

    own = [build(Asked(trace=path)) for path in trace or ()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror or error}") from error
    made = list(_tables(folder, seeds, own))
    command = " ".join(["unicron paper", str(folder), f"--seeds {seeds}", *(f"--trace {path}" for path in trace or ())])
    write_text(folder / "README.md", tables.document(TITLE, INTRODUCTION.format(command=command), made))
    for table in made:
        write_text(folder / f"{table.name}.json", json.dumps(table.as_json(), indent=1) + "\n")
    say(f"{len(made)} tables are in {folder / 'README.md'}, with pictures beside it")


def _tables(folder: Path, seeds: int, own: "list[Scene]") -> "Iterator[Table]":
    from unicron_lib.simulation import acme_table, paper_facts, paper_runs
    from unicron_lib.simulation.scenes import ABLATIONS, Asked, build

    yield paper_facts.figure_1()
    yield paper_runs.restart_path()
    yield paper_facts.detection()
    for name in ("trace-a", "trace-b"):
        yield _ratios(folder, name, build(Asked(trace=name, num_seeds=seeds)))
    for number, scene in enumerate(own, start=1):
        yield _ratios(folder, f"own-{number}", scene)
    yield _with_bar("five cases", paper_runs.multi_job_runs(seeds), lambda done: paper_runs.multi_job(seeds, done))
    yield paper_runs.transition_times()
    few = max(2, seeds // 4)
    yield _with_bar("ablations", 2 * few * (len(ABLATIONS) + 1), lambda done: paper_runs.worths(few, done))
    yield paper_facts.rsc()
    yield paper_facts.oobleck()
    yield acme_table.acme()
    yield _with_bar("up to 100,000 GPUs", len(paper_runs.FLEET_GPUS) * 7, paper_runs.sizes)


def _ratios(folder: Path, name: str, scene: "Scene") -> "Table":
    from unicron_lib.simulation import paper_runs, pictures, scenes

    with progress(len(scene.policies) * len(scene.traces), name) as done:
        found = scenes.compared(scene, done)
    picture = f"{name}.svg"
    write_text(folder / picture, pictures.draw(found))
    return replace(paper_runs.ratios(name, found, scene), picture=picture)


def _with_bar(what: str, total: int, make: "Callable[[Callable[[], None]], Table]") -> "Table":
    with progress(total, what) as done:
        return make(done)
