"""Undisturbed runs of the same seeds, in one process each, to compare loss curves with."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.errors import UnicronError
from unicron_lib.jobfile import job_spec


async def run_references(directory: Path, specs: Sequence[JobSpec]) -> dict[str, list[float]]:
    """Losses by iteration of each job. Raises UnicronError with the last words of a run that failed."""
    found = await asyncio.gather(*(_run(directory, spec) for spec in specs))
    return dict(zip((spec.job for spec in specs), found, strict=True))


async def _run(directory: Path, spec: JobSpec) -> list[float]:
    source, target = directory / f"{spec.job}.spec.json", directory / f"{spec.job}.reference.json"
    source.write_bytes(job_spec.dump_json(spec))
    arguments = ("-m", "unicron_lib.training.reference", "--spec", str(source), "--out", str(target))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=dict(os.environ), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    if process.returncode:
        words = err.decode(errors="replace").strip().splitlines()
        raise UnicronError(f"the reference run of {spec.job} failed: {words[-1] if words else 'no output'}")
    losses: list[float] = json.loads(target.read_text())["losses"]
    return losses
