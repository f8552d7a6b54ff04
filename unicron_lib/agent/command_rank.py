"""Ranks that run their job's own command: what they find in their environment, and what the agent says in their place."""

import asyncio
import re
import time
from pathlib import Path

from unicron_lib.agent.command_process import WORKING_DIR
from unicron_lib.agent.environment import NodeFacts, log_file
from unicron_lib.agent.excerpt import excerpt
from unicron_lib.agent.messages import LaunchRanks
from unicron_lib.agent.rank_messages import Progress, RankFinished
from unicron_lib.agent.ranks import Rank
from unicron_lib.checkpointing.megatron_tracker import tell_and_repair
from unicron_lib.diagnosis.tracebacks import TracebackReader
from unicron_lib.domain.jobs import JobSpec

COMMAND_TARGET = "unicron_lib.agent.command_process:main"
ALIVE_S = 10.0
"""A command that has lived for so long, and has not opened a session, counts as running."""
TAIL_BYTES = 256 << 10
"""Of a log the end is read: what ended the process is there."""
_LABEL = re.compile(r"^\[rank\d+\]:\s?")


def working_directory(facts: NodeFacts, spec: JobSpec) -> Path:
    """Where a job's command runs on a node; one of its own if its owner has named none, the same in every generation."""
    return Path(spec.working_dir) if spec.working_dir else facts.run_dir.absolute() / "work" / spec.job


def command_environment(facts: NodeFacts, command: LaunchRanks, rank: dict[str, str]) -> dict[str, str]:
    """The variables of a rank, as torchrun sets them, with those of the job's owner; makes the job's own directory.

    The generation's store is the agent's, so that `init_process_group()` connects to it and no rank serves one.
    """
    directory = working_directory(facts, command.spec)
    if not command.spec.working_dir:
        directory.mkdir(parents=True, exist_ok=True)
    return {
        "PYTHONUNBUFFERED": "1",  # what it printed last is the evidence of how it ended
        **_handling_of_nccl_errors(command.spec),
        **command.spec.env,
        **rank,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank["RANK"],
        "ROLE_WORLD_SIZE": rank["WORLD_SIZE"],
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        WORKING_DIR: str(directory),
    }


def _handling_of_nccl_errors(spec: JobSpec) -> dict[str, str]:
    """The process ends; one that parks must hear of an error where it waits, before it uses what a broken collective left."""
    if spec.parks:
        return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def still_alive(rank: Rank) -> Progress:
    """What stands for the first iteration of a command that tells of none: it runs."""
    return Progress(
        job=rank.job,
        generation=rank.generation,
        rank=rank.rank,
        iteration=rank.iteration,
        loss=0.0,
        iteration_s=0.0,
        flops=0.0,
        world_size=rank.world_size,
        at=time.time(),
    )


def finished(rank: Rank) -> RankFinished:
    """What its exit code 0 says."""
    loss = rank.progress.loss if rank.progress else 0.0
    job, generation, number = rank.key
    return RankFinished(job=job, generation=generation, rank=number, iteration=rank.iteration, loss=loss, whole_job=False)


def evidence(facts: NodeFacts, rank: Rank) -> str:
    """The last traceback in a command's log, "Type: message" in front; empty if there is none to be read."""
    if not rank.is_command:
        return ""
    try:
        with log_file(facts, rank.job, rank.generation, f"r{rank.rank}").open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - TAIL_BYTES))
            return last_traceback(log.read().decode(errors="replace"))
    except OSError:
        return ""


def last_traceback(text: str) -> str:
    """The last exception that a log shows, "Type: message" in front of the traceback; empty if there is none."""
    lines = [_LABEL.sub("", line) for line in text.splitlines()]
    reader = TracebackReader()
    found, begun = "", 0
    for number, line in enumerate(lines):
        was_inside = reader.is_inside
        raised = reader.read(line)
        if reader.is_inside and not was_inside:
            begun = number
        if raised and raised.heard and was_inside:
            found = "\n".join((f"{raised.type}: {raised.text}", *lines[begun : number + 1]))
    return excerpt(found)


async def told_of_checkpoints(facts: NodeFacts, spec: JobSpec | None) -> str:
    """One sentence on what Megatron-LM would go on from; empty if the job names no directory for its checkpoints."""
    if spec is None or not spec.checkpoint_dir:
        return ""
    directory = working_directory(facts, spec) / spec.checkpoint_dir
    return await asyncio.to_thread(tell_and_repair, directory, may_repair=spec.repair_tracker)
