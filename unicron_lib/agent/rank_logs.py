"""The end of a rank's log, for whoever wants to know why it failed."""

import asyncio

from unicron_lib.agent.environment import NodeFacts, log_file
from unicron_lib.agent.inquiries import ReadLog
from unicron_lib.diagnosis.tails import packed_tail
from unicron_lib.domain.events import Scalar
from unicron_lib.domain.jobs import NAME
from unicron_lib.errors import AgentError


async def read_log(facts: NodeFacts, command: ReadLog) -> dict[str, Scalar]:
    """What a `ReadLog` asks for. Raises AgentError for a log that is not here."""
    if not NAME.fullmatch(command.job):
        raise AgentError(f"{command.job!r} is no job's name")
    path = log_file(facts, command.job, command.generation, f"r{command.rank}")
    try:
        tail = await asyncio.to_thread(packed_tail, path)
    except OSError as error:
        raise AgentError(f"{path} on {facts.node} cannot be read: {error.strerror or error}") from error
    return {"file": tail.file, "first_line": tail.first_line, "packed": tail.packed}
