"""`unicron checkpoint`: have a running job save now, and wait until that is committed."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_lib.cli.options import AsJson, print_json, say
from unicron_lib.cli.target import find_target
from unicron_lib.errors import AgentError, CheckpointError, UserError

if TYPE_CHECKING:
    from unicron_lib.checkpointing.manifest import Manifest
    from unicron_lib.checkpointing.repository import CheckpointRepository
    from unicron_lib.cli.target import Target
    from unicron_lib.domain.cluster import ClusterState
    from unicron_lib.domain.plans import Assignment

LOOK_S, TELLING_S, ANSWER_S = 0.2, 5.0, 10.0


def checkpoint(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for the commit.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Have a running job save a checkpoint at the end of its iteration, and train on; `unicron cancel` also ends it."""
    target = find_target()
    began = time.monotonic()
    manifest = asyncio.run(_saved(target, job, began + timeout))
    seconds = time.monotonic() - began
    if as_json:
        print_json(
            {
                "job": job,
                "iteration": manifest.iteration,
                "generation": manifest.generation,
                "bytes": manifest.num_bytes,
                "seconds": seconds,
                "manifest": manifest.key,
            }
        )
    else:
        say(f"{job}: iteration {manifest.iteration} is saved, {manifest.num_bytes / 1e6:.2f} MB, {seconds:.1f} s")


async def _saved(target: "Target", job: str, deadline: float) -> "Manifest":
    """The checkpoint that was ordered; ordered again if the job moves meanwhile. Raises CheckpointError, UserError."""
    from unicron_lib.adapters.stores import open_store
    from unicron_lib.checkpointing.repository import CheckpointRepository

    journal, repository = target.journal(), CheckpointRepository(open_store(target.store_url), job)
    ordered, told_at = None, time.monotonic()
    after = -1
    while time.monotonic() < deadline:
        placed = _placed(await asyncio.to_thread(journal.refresh), job)
        if placed is not None and placed.generation != ordered:
            after = await _order(target, placed)
            ordered = placed.generation
            say(f"{job} is asked to save; its last iteration is {after}")
        if ordered is not None and (found := await asyncio.to_thread(_newer, repository, after)):
            return found
        if time.monotonic() - told_at > TELLING_S:
            told_at = time.monotonic()
            say(f"{job}: {'waiting for the commit' if ordered else 'it is being moved'}")
        await asyncio.sleep(LOOK_S)
    raise CheckpointError(
        f"{job} has not committed a checkpoint in time: see whether the store answers (`unicron checkpoints {job}`)"
    )


def _placed(state: "ClusterState", job: str) -> "Assignment | None":
    """Where the job runs, None while it moves; raises UserError for one that cannot save."""
    from unicron_lib.domain.jobs import JobStatus

    present = state.jobs.get(job)
    if present is None or present.status is not JobStatus.RUNNING:
        running = ", ".join(sorted(name for name, it in state.jobs.items() if it.status is JobStatus.RUNNING)) or "none"
        raise UserError(f"no job {job!r} is running: those that are: {running}")
    if present.spec.command:
        raise UserError(f"{job} runs a command of its own, which saves when it wants to: `unicron cancel` asks it to stop")
    assignment = present.assignment
    return assignment if assignment and assignment.generation == present.generation and not present.pending else None


async def _order(target: "Target", placed: "Assignment") -> int:
    """Have the job save; the last iteration that was complete before. Raises AgentError, ControllerError."""
    from unicron_lib.agent.memory_messages import SaveCheckpoint

    step = f"save/{placed.job}/{time.time():.6f}"
    command = SaveCheckpoint(step=step, job=placed.job, generation=placed.generation)
    async with target.client() as client:
        reply = await client.command(placed.slots[0].node, command, timeout_s=ANSWER_S)
    if not reply.ok:
        raise AgentError(f"{placed.slots[0].node} refused: {reply.error}")
    iteration = reply.result["iteration"]
    assert isinstance(iteration, int)
    return iteration


def _newer(repository: "CheckpointRepository", iteration: int) -> "Manifest | None":
    key = next(iter(repository.manifest_keys()), None)
    manifest = repository.load_manifest(key) if key else None
    return manifest if manifest and manifest.iteration > iteration else None
