"""`unicron checkpoints`: what each job has saved, which of it a restart would take, and whether every byte is right."""

import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron_lib.cli.options import AsJson, console, print_json, say
from unicron_lib.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from unicron_lib.checkpointing.store import ObjectStore
    from unicron_lib.checkpointing.survey import Found

TELLING_S = 2.0


def checkpoints(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Only those of JOB.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Download all and check every digest.")] = False,
    store: Annotated[
        str, typer.Option(metavar="URL", help="s3://bucket/prefix or file:///folder, instead of the cluster's.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """What the jobs have saved, and what a restart would take; exit code 1 if --verify finds damage."""
    from unicron_lib.adapters.stores import check_store, open_store
    from unicron_lib.checkpointing.survey import jobs_of
    from unicron_lib.domain.jobs import NAME

    if job and not NAME.fullmatch(job):
        raise UserError(f"{job[:80]!r} is no job's name")
    opened = open_store(store or store_url())
    check_store(opened)
    rows = [row for name in ([job] if job else jobs_of(opened)) for row in _rows(opened, name, verify=verify)]
    if job and not rows:
        raise UserError(
            f"job {job} has no checkpoints in {opened.url}: there are those of {', '.join(jobs_of(opened)) or 'none'}"
        )
    print_json({"store": opened.url, "checkpoints": rows}) if as_json else _show(rows)
    raise typer.Exit(1 if any(row["verified"] is False for row in rows) else 0)


def store_url() -> str:
    """Of the store that the environment or the cluster names."""
    from unicron_lib.cli.target import find_target

    return os.environ.get("UNICRON_STORE_URL") or find_target().store_url


def _rows(store: "ObjectStore", job: str, *, verify: bool) -> list[dict[str, Any]]:
    from unicron_lib.checkpointing.repository import CheckpointRepository
    from unicron_lib.checkpointing.survey import State, survey
    from unicron_lib.checkpointing.survey import verify as check

    repository = CheckpointRepository(store, job)
    rows = []
    for found in survey(repository, job):
        row = _row(found)
        if verify and found.state in {State.NEWEST, State.COMPLETE}:
            damage = check(repository, found, _progress(found))
            row |= {"verified": not damage, "reason": damage}
        rows.append(row)
    return rows


def _row(found: "Found") -> dict[str, Any]:
    manifest = found.manifest
    layout = manifest.layout if manifest else None
    return {
        "job": found.job,
        "iteration": found.iteration,
        "generation": found.generation,
        "state": str(found.state),
        "committed_at": manifest.committed_at or None if manifest else None,
        "bytes": manifest.num_bytes if manifest else None,
        "shards": len(manifest.shards) if manifest else None,
        "layout": {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp} if layout else None,
        "blocking_s": manifest.blocking_s if manifest else None,
        "upload_s": manifest.upload_s if manifest else None,
        "verified": None,
        "reason": found.reason,
    }


def _progress(found: "Found") -> "Callable[[int], None]":
    whole = found.manifest.num_bytes if found.manifest else 0
    told_at = time.monotonic()

    def arrived(num_bytes: int) -> None:
        nonlocal told_at
        if num_bytes == whole or time.monotonic() - told_at >= TELLING_S:
            told_at = time.monotonic()
            say(f"{found.job}, iteration {found.iteration}: {num_bytes / 1e6:.1f} of {whole / 1e6:.1f} MB")

    return arrived


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="checkpoints" if rows else "no checkpoints", title_justify="left")
    for name in ("job", "iteration", "generation", "saved (UTC)", "MB", "shards", "layout", "state", "why"):
        table.add_column(name, justify="right" if name in {"iteration", "generation", "MB", "shards"} else "left")
    for row in rows:
        at, size, layout = row["committed_at"], row["bytes"], row["layout"]
        table.add_row(
            *(row["job"], str(row["iteration"]), str(row["generation"])),
            datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at else "",
            "" if size is None else f"{size / 1e6:.2f}",
            "" if row["shards"] is None else str(row["shards"]),
            " ".join(f"{name}={number}" for name, number in layout.items()) if layout else "",
            _state(row),
            row["reason"],
        )
    console().print(table)


def _state(row: dict[str, Any]) -> str:
    verified = {True: ", verified", False: ", DAMAGED", None: ""}[row["verified"]]
    return f"{row['state']}{verified}"
