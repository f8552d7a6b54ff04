"""A controller and agents as real processes on the loopback device, without Prefect and torch, to measure them."""

import asyncio
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import TypeVar

from unicron_lib.agent.bell import Bell
from unicron_lib.agent.messages import Command, LaunchRanks, Observation, Reply
from unicron_lib.controller.client import ControllerClient
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import AgentError, ControllerError, UnicronError
from unicron_lib.local.processes import MARK, Program, free_port, start, sweep, tail

T = TypeVar("T")
PATIENCE_S = 60.0
LOOK_S = 0.02
GRACE_S = 5.0
RANK_TARGET = "unicron_lib.local.bench_rank:main"


class BenchFailed(UnicronError):
    """What was to be measured did not happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An observation, and when a health task would have got it, by the monotonic clock."""

    at: float
    observation: Observation


class BenchCluster:
    """Starts the processes, sends commands, collects observations as a health task does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kernel_log = directory / "kmsg"
        self.seen: list[Seen] = []
        self._mark = f"bench-{secrets.token_hex(8)}"
        self._port = free_port()
        token = secrets.token_urlsafe(32)
        self._token_file = directory / "token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(token)
        (directory / "store").mkdir()
        self.kernel_log.touch()
        self.client = ControllerClient(f"http://127.0.0.1:{self._port}", token)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._agents: list[subprocess.Popen[bytes]] = []
        self._bell = Bell()
        self._collecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the controller. Raises BenchFailed with its last words."""
        store_url = (self.directory / "store").as_uri()
        arguments = ("--port", str(self._port), "--token-file", str(self._token_file), "--store-url", store_url)
        self._start("controller", "unicron_lib.controller", *arguments)
        await self.eventually(self.client.health, "the controller")
        self._collecting = asyncio.create_task(self._collect())

    async def add_nodes(
        self, *nodes: str, num_gpus: int = 1, rank_target: str = RANK_TARGET
    ) -> dict[str, subprocess.Popen[bytes]]:
        """Start the agents of new nodes; returns once all have joined. Raises BenchFailed."""
        agents = {node: self._start_agent(node, num_gpus, rank_target) for node in nodes}
        self._agents += agents.values()
        for node, agent in agents.items():

            async def joined(node: str = node, agent: subprocess.Popen[bytes] = agent) -> bool:
                if agent.poll() is not None:
                    raise BenchFailed(f"the agent of {node} ended with {agent.returncode}: {tail(self._log(node))}")
                return any(view.node == node and view.connected for view in await self.client.nodes())

            await self.eventually(joined, node)
        return agents

    async def launch(self, node: str, spec: JobSpec, *, ranks: int, generation: int = 1) -> list[int]:
        """Start ranks of the bench's own on `node`; their process ids in the order of the ranks."""
        command = LaunchRanks(
            step=f"launch/{spec.job}/{generation}",
            job=spec.job,
            generation=generation,
            spec=spec,
            layout=Layout(dp=ranks),
            ranks=tuple((rank, rank) for rank in range(ranks)),
            world_size=ranks,
            node_rank=0,
            num_nodes=1,
            master_addr="127.0.0.1",
            master_port=1,
            store_url="",
        )
        reply = await self.command(node, command)
        started = reply.result["pids"]
        assert isinstance(started, list)
        return [int(str(entry["pid"])) for entry in started]

    async def command(self, node: str, command: Command) -> Reply:
        """Have an agent do something. Raises AgentError if it refuses."""
        reply = await self.client.command(node, command)
        if not reply.ok:
            raise AgentError(f"{node} refused: {reply.error}")
        return reply

    async def iterated(self, job: str, iteration: int, *, generation: int = 1, ranks: int = 1) -> None:
        """Wait until `ranks` ranks of `job` have done `iteration`. Raises BenchFailed."""

        async def far_enough() -> bool:
            progress = await self.client.job_progress(job)
            done = progress.iterations.values() if progress and progress.generation == generation else ()
            return sum(at >= iteration for at in done) >= ranks

        await self.eventually(far_enough, f"iteration {iteration} of {job}")

    async def observed(self, is_it: Callable[[Observation], bool], what: str, *, patience_s: float = PATIENCE_S) -> Seen:
        """The first observation, from the start on, that is the one. Raises BenchFailed."""

        def found() -> Seen | None:
            return next((seen for seen in self.seen if is_it(seen.observation)), None)

        await self._bell.until(lambda: found() is not None, timeout_s=patience_s)
        seen = found()
        if seen is None:
            raise BenchFailed(f"waited {patience_s:.0f} s in vain for the observation of {what}: see {self.directory}")
        return seen

    async def stop(self) -> None:
        """End all processes, politely where there is time; nothing is left."""
        if self._collecting:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        await self.client.aclose()
        for process in self._processes:  # agents would wait, on SIGTERM, until their jobs have moved
            process.send_signal(signal.SIGINT if process in self._agents else signal.SIGTERM)
        await asyncio.to_thread(sweep, self._mark, grace_s=GRACE_S)
        for process in self._processes:
            process.wait()

    def _start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = Program(name=name, arguments=("-m", module, *arguments), log=self._log(name))
        process = start(program, {**environ, MARK: self._mark})
        self._processes.append(process)
        return process

    def _start_agent(self, node: str, num_gpus: int, rank_target: str) -> subprocess.Popen[bytes]:
        return self._start(
            node,
            "unicron_lib.agent",
            *("--controller", f"ws://127.0.0.1:{self._port}/v1/agents", "--token-file", str(self._token_file)),
            *("--node", node, "--address", "127.0.0.1", "--num-gpus", str(num_gpus), "--interface", "lo"),
            *("--run-dir", str(self.directory / "run"), "--rank-target", rank_target, "--kernel-log", str(self.kernel_log)),
            *("--spot-notices", "off"),
        )

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    async def _collect(self) -> None:
        """Take observations as a health task does: wait for them, keep them, acknowledge them."""
        while True:
            with suppress(ControllerError):
                found = await self.client.observations(wait_s=30.0)
                at = time.monotonic()
                self.seen += [Seen(at=at, observation=observation) for observation in found]
                self._bell.ring()
                await self.client.acknowledge([observation.id for observation in found])

    async def eventually(self, ask: Callable[[], Awaitable[T | None]], what: str) -> T:
        """The first answer that is true; `what` names it, and its log if it has one. Raises BenchFailed."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(ControllerError):
                if answer := await ask():
                    return answer
            await asyncio.sleep(LOOK_S)
        raise BenchFailed(f"waited {PATIENCE_S:.0f} s in vain for {what}: {tail(self._log(what))}")


@asynccontextmanager
async def bench_cluster() -> AsyncIterator[BenchCluster]:
    """A controller in a directory of its own; at the end all is stopped and, unless something failed, removed."""
    directory = Path(tempfile.mkdtemp(prefix="unicron-bench-"))
    cluster = BenchCluster(directory)
    try:
        await cluster.start()
        yield cluster
    finally:
        await asyncio.shield(cluster.stop())
    shutil.rmtree(directory)
