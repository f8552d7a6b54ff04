"""The node check's part on a node: a process that tests the devices and meets those of other nodes."""

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from unicron_lib.agent.environment import NodeFacts, log_file, network_environment
from unicron_lib.agent.forks import Forked, Forks
from unicron_lib.agent.inquiries import CheckNode
from unicron_lib.agent.supervisor import end_processes
from unicron_lib.domain.events import Scalar
from unicron_lib.errors import AgentError

log = logging.getLogger(__name__)
CHECK_TARGET = "unicron_lib.training.check:main"
Found = dict[str, Scalar | list[dict[str, Scalar]]]
NOTHING: Found = {"exchanged": False, "gather_s": 0.0, "compute_s": 0.0, "faults": [], "error": ""}


@dataclass(slots=True, kw_only=True, eq=False)
class _Check:
    process: Forked | None = None
    given_up: bool = False

    async def end(self) -> None:
        await end_processes([self.process] if self.process else [], grace_s=0.0)


class NodeChecks:
    """Runs the node's checks; a job that comes ends them."""

    def __init__(self, *, facts: NodeFacts, forks: Forks, directory: Path) -> None:
        self._facts = facts
        self._forks = forks
        self._directory = directory
        self._running: set[_Check] = set()

    async def run(self, command: CheckNode) -> Found:
        """What the check found within its deadline; raises AgentError if it was given up for a job, or another one runs."""
        if self._running:
            raise AgentError(f"another check runs on {self._facts.node}: wait for its end")
        found_file = self._directory / f"check-{command.generation}.json"
        output = log_file(self._facts, command.job, command.generation, f"{self._facts.node}-{command.rank}")
        check = _Check()
        self._running.add(check)
        try:
            process = check.process = await self._forks.spawn(
                target=CHECK_TARGET,
                env=self._environment(command, found_file),
                log_file=output,
                on_exit=lambda code: log.info("%s %d ended with code %d", command.job, command.generation, code),
            )
            late = not check.given_up and not await _ends(process, command.deadline_s)
        finally:
            self._running.discard(check)
            await check.end()
        if check.given_up:
            raise AgentError(f"the check of {self._facts.node} was given up: ranks are launched there")
        wrong = f"not done within {command.deadline_s:g} s" if late else _how_it_ended(process, output)
        return _read(found_file) | ({"error": wrong} if wrong else {})

    async def give_up(self) -> None:
        """End all checks at once: they would be in the way of a job."""
        for check in list(self._running):
            check.given_up = True
            await check.end()

    def _environment(self, command: CheckNode, found_file: Path) -> dict[str, str]:
        values: dict[str, object] = {
            "RANK": command.rank,
            "WORLD_SIZE": command.world_size,
            "MASTER_ADDR": command.master_addr,
            "MASTER_PORT": command.master_port,
            "UNICRON_CHECK_FILE": found_file,
            "UNICRON_CHECK_DEADLINE_S": command.deadline_s,
        }
        if self._facts.has_gpus:
            values["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(self._facts.num_gpus)))
        return {name: str(value) for name, value in values.items()} | network_environment(self._facts)


async def _ends(process: Forked, deadline_s: float) -> bool:
    try:
        async with asyncio.timeout(deadline_s):
            await process.ended.wait()
    except TimeoutError:
        return False
    return True


def _how_it_ended(process: Forked, output: Path) -> str:
    return f"ended with code {process.exit_code}: see {output}" if process.exit_code else ""


def _read(path: Path) -> Found:
    """What the process wrote, or nothing; the file is gone afterwards."""
    try:
        found: Found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return dict(NOTHING)
    path.unlink()
    return found
