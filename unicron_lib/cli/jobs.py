"""`unicron submit` and `unicron cancel`."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from unicron_lib.cli.options import AsJson, print_json, say
from unicron_lib.cli.target import find_target
from unicron_lib.errors import UserError


def submit(
    file: Annotated[Path, typer.Argument(help="A job's deployment YAML, see infra/jobs.")], as_json: AsJson = False
) -> None:
    """Check a job's file, deploy it to Prefect and start its train run."""
    from unicron_lib.domain.events import submitted
    from unicron_lib.domain.jobs import ENDED
    from unicron_lib.jobfile import read_jobs
    from unicron_lib.local.cluster import deploy

    specs = read_jobs(file)
    target = find_target()
    journal = target.journal()
    state = journal.refresh()
    for spec in specs:
        present = state.jobs.get(spec.job)
        if present and present.status not in ENDED:
            raise UserError(f"the name {spec.job} is taken by a job that is {present.status}: cancel it or choose another name")
    runs = asyncio.run(deploy(target.env, "--run", str(file)))
    for spec, run in zip(specs, runs, strict=True):  # from here on the job is known, whatever becomes of its run
        journal.append(submitted(spec, submission=run["flow_run"], at=time.time()))
    if as_json:
        print_json({"runs": runs})
    else:
        for spec, run in zip(specs, runs, strict=True):
            say(f"{spec.job} is submitted: {run['url']}")
            if spec.command and not (spec.throughput_flops or spec.throughput_by_pool):
                say(f"{spec.job} has no throughput_flops: until it is measured, twice the GPUs count as twice as fast")


def cancel(job: Annotated[str, typer.Argument(help="The job's name.")], as_json: AsJson = False) -> None:
    """End a job: its ranks save a checkpoint and stop, its GPUs go to the others."""
    from unicron_lib.domain.events import JobCancelled
    from unicron_lib.domain.jobs import ENDED

    journal = find_target().journal()
    present = journal.refresh().jobs.get(job)
    if present is None or present.status in ENDED:
        known = ", ".join(sorted(name for name, it in journal.state.jobs.items() if it.status not in ENDED)) or "none"
        raise UserError(f"no job {job!r} is running or queued: those that are: {known}")
    event = JobCancelled(id=f"cancelled/{job}/{present.submission}", at=time.time(), job=job, submission=present.submission)
    journal.append(event)
    if as_json:
        print_json({"job": job, "status": "cancelled"})
    else:
        say(f"{job} is cancelled")
