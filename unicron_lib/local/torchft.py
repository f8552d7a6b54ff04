"""torchft on this machine, as what Unicron is measured against: a lighthouse, and ranks that come again when they end."""

import asyncio
import importlib.util
import os
import secrets
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.jobfile import job_spec
from unicron_lib.local.processes import MARK, Program, free_port, start, sweep
from unicron_lib.local.torchrun import MONITOR_S
from unicron_lib.training.ledger import ledger_directory


def is_installed() -> bool:
    """Whether this Python has torchft."""
    return importlib.util.find_spec("torchft") is not None


class Torchft:
    """`ranks` ranks of a job; whoever ends is started again, as torchrun would, unless its node is away."""

    def __init__(self, spec: JobSpec, directory: Path, *, ranks: int) -> None:
        self.ledgers = ledger_directory(directory, spec.job)
        self.mark = f"torchft-{secrets.token_hex(8)}"
        self._ranks, self._directory = ranks, directory
        self._port = free_port()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._away: set[int] = set()
        self._keeper: asyncio.Task[None] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "spec.json").write_bytes(job_spec.dump_json(spec))

    def start(self) -> None:
        """Start the lighthouse and all ranks."""
        self._lighthouse = self._start("lighthouse", "--serve")
        self._keeper = asyncio.create_task(self._keep())

    def process(self, rank: int) -> subprocess.Popen[bytes]:
        """That of a rank; SIGUSR1 has it raise an exception in the iteration under way."""
        return self._processes[rank]

    def lose(self, ranks: Iterable[int]) -> None:
        """SIGKILL of ranks that do not come back before `bring_back`."""
        self._away |= set(ranks)
        for rank in self._away:
            self._processes[rank].kill()

    def bring_back(self) -> None:
        """The lost ranks are started again."""
        self._away.clear()

    async def stop(self) -> None:
        """End all processes; nothing is left."""
        if self._keeper:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        await asyncio.to_thread(sweep, self.mark)
        for process in [self._lighthouse, *self._processes.values()]:
            process.wait()

    async def _keep(self) -> None:
        while True:
            for rank in set(range(self._ranks)) - self._away:
                process = self._processes.get(rank)
                if process is None or process.poll() is not None:
                    arguments = ("--spec", str(self._directory / "spec.json"), "--dir", str(self._directory))
                    self._processes[rank] = self._start(f"rank{rank}", *arguments, "--rank", str(rank))
            await asyncio.sleep(MONITOR_S)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        module = ("-m", "unicron_lib.training.baseline_torchft", "--lighthouse", str(self._port))
        program = Program(name=name, arguments=(*module, *arguments), log=self._directory / f"{name}.log")
        return start(program, {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
