"""`unicron characterize`: what a cluster's jobs are like, from its scheduler's job table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.cli.options import AsJson, console, print_json
from unicron_lib.errors import UserError

if TYPE_CHECKING:
    from unicron_lib.diagnosis.characterize import Characterization

JobsFile = Annotated[
    Path, typer.Argument(metavar="JOBS.csv", help="Job table: Acme's columns, `sacct -P` or the like; - for standard input.")
]
FailuresFile = Annotated[
    Path | None,
    typer.Option("--failures", metavar="FAILURES.csv", help="Why jobs failed: columns job_id, reason, and more if known."),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="DIR", help="Draw the figures as SVGs into a directory.")]


def characterize(jobs: JobsFile, failures: FailuresFile = None, plot: Plot = None, as_json: AsJson = False) -> None:
    """Say who uses the GPUs, how long jobs run and wait, and what their failures cost. Needs no server."""
    from unicron_lib.cli.characterize_tables import show
    from unicron_lib.diagnosis import characterize as figures
    from unicron_lib.diagnosis import job_table

    notes = job_table.read_notes(failures) if failures else None
    found = figures.characterize(job_table.read(jobs, notes))
    if plot:
        _draw(found, plot)
    if as_json:
        print_json(figures.as_json(found))
    else:
        show(found, console())


def _draw(found: "Characterization", folder: Path) -> None:
    from unicron_lib.diagnosis.job_pictures import pictures

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pictures(found).items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be drawn into: {error.strerror or error}") from error
