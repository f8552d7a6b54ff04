"""Rendezvous stores: one process for each generation that this node hosts the store of."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unicron_lib.agent.environment import NodeFacts, log_file, network_environment
from unicron_lib.agent.forks import Forked, Forks
from unicron_lib.agent.supervisor import end_processes
from unicron_lib.errors import AgentError

log = logging.getLogger(__name__)
RENDEZVOUS_TARGET = "unicron_lib.training.rendezvous:main"
OPEN_TIMEOUT_S = 20.0
LOOK_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Store:
    job: str
    generation: int
    process: Forked
    port: int


class RendezvousStores:
    """Starts and ends the stores of this node."""

    def __init__(self, *, facts: NodeFacts, forks: Forks, directory: Path, target: str = RENDEZVOUS_TARGET) -> None:
        self._facts = facts
        self._forks = forks
        self._directory = directory
        self._target = target
        self._stores: dict[tuple[str, int], _Store] = {}

    async def open(self, job: str, generation: int) -> int:
        """The port of the generation's store, which is started unless it runs; raises AgentError."""
        known = self._stores.get((job, generation))
        if known and known.process.exit_code is None:
            return known.port
        port_file = self._directory / f"{job}-{generation}.port"
        port_file.unlink(missing_ok=True)
        output = log_file(self._facts, job, generation, "rendezvous")
        process = await self._forks.spawn(
            target=self._target,
            env={"MASTER_ADDR": self._facts.address, "UNICRON_PORT_FILE": str(port_file)} | network_environment(self._facts),
            log_file=output,
            on_exit=lambda code: log.info("the store of %s generation %d ended with code %d", job, generation, code),
        )
        try:
            port = await _read_port(port_file, process, output)
        except BaseException:
            await end_processes([process], grace_s=0.0)
            raise
        self._stores[job, generation] = _Store(job=job, generation=generation, process=process, port=port)
        return port

    async def close(self, unneeded: Callable[[str, int], bool], *, grace_s: float) -> int:
        """End the stores whose job and generation are `unneeded`; their number."""
        closing = [store for key, store in self._stores.items() if unneeded(*key)]
        for store in closing:
            del self._stores[store.job, store.generation]
        living = [store.process for store in closing if store.process.exit_code is None]
        await end_processes(living, grace_s=grace_s)
        return len(living)


async def _read_port(port_file: Path, process: Forked, output: Path) -> int:
    try:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            while not (told := _read(port_file)):
                if process.exit_code is not None:
                    raise AgentError(f"the rendezvous store ended with code {process.exit_code}: see {output}")
                await asyncio.sleep(LOOK_INTERVAL_S)
    except TimeoutError:
        raise AgentError(f"the rendezvous store named no port within {OPEN_TIMEOUT_S:g} s: see {output}") from None
    return int(json.loads(told)["port"])


def _read(port_file: Path) -> bytes:
    """What the store wrote, in one piece, or nothing."""
    try:
        return port_file.read_bytes()
    except FileNotFoundError:
        return b""
