"""`unicron export` and `unicron import`: checkpoints to and from Megatron's `torch_dist` folders."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.cli.checkpoints import TELLING_S, store_url
from unicron_lib.cli.options import AsJson, print_json, say
from unicron_lib.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from unicron_lib.checkpointing.repository import CheckpointRepository
    from unicron_lib.checkpointing.store import ObjectStore
    from unicron_lib.domain.jobs import JobSpec, JobState

Store = Annotated[str, typer.Option(metavar="URL", help="s3://bucket/prefix or file:///folder, instead of the cluster's.")]


def export(
    job: Annotated[str, typer.Argument(help="A job of the cluster, or a job's file.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where Megatron would load from (--load).")],
    iteration: Annotated[
        int | None, typer.Option(min=0, help="As `unicron checkpoints` tells it, instead of the newest.")
    ] = None,
    store: Store = "",
    as_json: AsJson = False,
) -> None:
    """Write a job's newest checkpoint that is whole as a torch_dist folder of Megatron's, with the optimizer's state."""
    opened = _open(store)
    spec = _spec(opened, job)
    say(f"{spec.job}: reading its checkpoint")

    from unicron_lib.checkpointing.repository import CheckpointRepository
    from unicron_lib.training import exporting

    manifest, state, skipped = exporting.choose(CheckpointRepository(opened, spec.job), iteration)
    for reason in skipped:
        say(f"passed over: {reason}")
    folder, is_new = exporting.export(manifest, state, spec, directory.absolute())
    is_next = exporting.is_pointed_to(folder)
    if as_json:
        print_json(
            {
                "job": spec.job,
                "iteration": manifest.iteration,
                "folder": str(folder),
                "written": is_new,
                "resumed_from": is_next,
            }
        )
        return
    say(f"{folder} {'holds' if is_new else 'held already'} what {spec.job} was after iteration {manifest.iteration}")
    if not is_next:
        say(f"Megatron would go on from a later iteration of {folder.parent}: its tracker is left as it is")


def import_(
    file: Annotated[Path, typer.Argument(help="The job's file.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="One of Megatron's (--save), or one iter_ folder.")],
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Of Megatron's folders the one after so many iterations, not the newest.")
    ] = None,
    parameters_only: Annotated[bool, typer.Option("--parameters-only", help="Leave the optimizer's state out.")] = False,
    set_newer_aside: Annotated[
        bool, typer.Option("--set-newer-aside", help="Condemn the job's own checkpoints that are as new or newer.")
    ] = False,
    store: Store = "",
    as_json: AsJson = False,
) -> None:
    """Have a job begin with a checkpoint of Megatron's: a torch_dist folder becomes one of its own. Submit it afterwards."""
    opened = _open(store)
    spec = _only_job(file)
    present = _present(opened, spec.job)

    from unicron_lib.checkpointing.repository import CheckpointRepository
    from unicron_lib.training import importing

    source = importing.open_source(directory.absolute(), iteration, spec, parameters_only=parameters_only)
    repository = CheckpointRepository(opened, spec.job)
    generation = _generation(opened, spec.job, present)
    newer = _newer(repository, spec.job, (source.iteration, generation), may_set_aside=set_newer_aside)
    manifest = importing.bring_in(source, repository, spec, generation=generation, set_aside=newer, arrived=_progress(spec.job))
    notes = [
        *source.notes,
        *(() if spec.load == "latest" else (f"{file} needs the key `load: latest`, else the job begins anew",)),
    ]
    if as_json:
        print_json({"job": spec.job, "iteration": manifest.iteration, "checkpoint": manifest.key, "notes": notes})
        return
    say(f"{spec.job} has a checkpoint of iteration {manifest.iteration}, generation {generation}: submit goes on from it")
    for note in notes:
        say(f"note: {note}")


def _open(url: str) -> "ObjectStore":
    from unicron_lib.adapters.stores import check_store, open_store

    opened = open_store(url or store_url())
    check_store(opened)
    return opened


def _spec(store: "ObjectStore", job: str) -> "JobSpec":
    """Of a job of the cluster, as it was submitted last, or of a job's file."""
    from unicron_lib.domain.jobs import NAME
    from unicron_lib.journal import Journal

    if not NAME.fullmatch(job):
        return _only_job(Path(job))
    state = Journal(store).refresh()
    if job not in state.jobs:
        known = ", ".join(sorted(state.jobs)) or "none"
        raise UserError(f"the cluster of {store.url} has no job {job}, there are {known}: give the job's file instead")
    return _of_our_trainer(state.jobs[job].spec)


def _only_job(file: Path) -> "JobSpec":
    from unicron_lib.jobfile import read_jobs

    specs = read_jobs(file)
    if len(specs) != 1:
        raise UserError(f"{file} describes {', '.join(spec.job for spec in specs)}: give a file with one job")
    return _of_our_trainer(specs[0])


def _of_our_trainer(spec: "JobSpec") -> "JobSpec":
    if spec.command:
        raise UserError(f"{spec.job} has a command, which keeps checkpoints of its own")
    return spec


def _present(store: "ObjectStore", job: str) -> "JobState | None":
    """What the cluster knows of the job. Raises UserError if it runs, or waits to."""
    from unicron_lib.domain.jobs import ENDED
    from unicron_lib.journal import Journal

    present = Journal(store).refresh().jobs.get(job)
    if present is not None and present.status not in ENDED:
        raise UserError(f"{job} is {present.status}: cancel it first, or give the job another name")
    return present


def _generation(store: "ObjectStore", job: str, present: "JobState | None") -> int:
    """The newest there has been: the next one admits what it has saved, an older one could save nothing."""
    from unicron_lib.checkpointing.fences import Fences

    _, closing = Fences(store, f"jobs/{job}").newest_and_closing()
    return max(closing, present.generation if present else 0, 0)


def _newer(repository: "CheckpointRepository", job: str, place: tuple[int, int], *, may_set_aside: bool) -> list[str]:
    """Keys of the job's own checkpoints that would count more. Raises UserError if there are some that may not be set aside."""
    from unicron_lib.checkpointing.manifest import parse_key

    condemned = repository.condemned()
    keys = {key: parse_key(job, key) for key in repository.manifest_keys()}
    iteration, generation = place
    found = [key for key, (theirs, _) in keys.items() if key not in condemned and theirs >= iteration]
    if found and not may_set_aside:
        raise UserError(
            f"{job} has a checkpoint of iteration {keys[found[0]][0]} already, the one to import is of {iteration}: give "
            "the job another name, or --set-newer-aside"
        )
    if place in keys.values():
        raise CheckpointError(
            f"{job} has a checkpoint of iteration {iteration} and generation {generation}, which is never overwritten: "
            "give the job another name"
        )
    return found


def _progress(job: str) -> "Callable[[int], None]":
    told_at = time.monotonic()

    def arrived(num_bytes: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= TELLING_S:
            told_at = time.monotonic()
            say(f"{job}: {num_bytes / 1e6:.1f} MB are uploaded")

    return arrived
