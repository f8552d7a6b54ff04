"""torchrun on this machine, as what Unicron is measured against: an agent a node, and hands to hurt its ranks."""

import asyncio
import os
import secrets
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from unicron_lib.domain.jobs import JobSpec
from unicron_lib.jobfile import job_spec
from unicron_lib.local.processes import MARK, Program, free_port, marked, start, sweep
from unicron_lib.local.strikes import BenchStopped
from unicron_lib.training.ledger import ledger_directory

MONITOR_S = 0.1
MAX_RESTARTS = 1000
GRACE_S = 5.0


class Torchrun:
    """`ranks` ranks of a job on up to `nodes` nodes, of which one is enough; everything in `directory`."""

    def __init__(self, spec: JobSpec, directory: Path, *, ranks: int, nodes: int) -> None:
        self.ledgers = ledger_directory(directory, spec.job)
        self.ranks, self._nodes, self._directory = ranks, nodes, directory
        self.mark = f"torchrun-{secrets.token_hex(8)}"
        self._port = free_port()
        self._agents: list[subprocess.Popen[bytes]] = []
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "spec.json").write_bytes(job_spec.dump_json(spec))

    def start_node(self) -> None:
        """Start another agent; the first one holds the rendezvous."""
        is_host = not self._agents
        program = Program(name="torchrun", arguments=self._arguments(is_host=is_host), log=self._directory / "torchrun.log")
        self._agents.append(start(program, self._environment()))

    def process(self, rank: int) -> psutil.Process:
        """That of a rank; SIGUSR1 has it raise an exception in the iteration under way. Raises BenchStopped."""
        for process in marked(self.mark):
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    return process
        raise BenchStopped(f"torchrun has no rank {rank} now")

    def kill_node(self) -> None:
        """SIGKILL of the newest agent and its ranks."""
        agent = self._agents.pop()
        for process in [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()

    async def stop(self) -> None:
        """End all processes; nothing is left."""
        for agent in self._agents:
            agent.terminate()
        await asyncio.to_thread(sweep, self.mark, grace_s=GRACE_S)
        for agent in self._agents:
            agent.wait()

    def _arguments(self, *, is_host: bool) -> tuple[str, ...]:
        return (
            *(
                "-m",
                "torch.distributed.run",
                "--nnodes",
                f"1:{self._nodes}",
                "--nproc-per-node",
                str(self.ranks // self._nodes),
            ),
            *("--max-restarts", str(MAX_RESTARTS), "--monitor-interval", str(MONITOR_S), "--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", self.mark),
            *("--rdzv-conf", f"is_host={int(is_host)}"),
            *("-m", "unicron_lib.training.baseline", "--spec", str(self._directory / "spec.json")),
            *("--dir", str(self._directory)),
        )

    def _environment(self) -> Mapping[str, str]:
        # With one store for all attempts gloo may find the addresses of dead ranks, and waits for them in vain (pytorch#135712)
        alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return {**os.environ, MARK: self.mark, **alone, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
