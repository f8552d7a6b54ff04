"""A controller and agents as real processes on the loopback device."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil

from unicron_lib.adapters.stores import create_store
from unicron_lib.agent.messages import LaunchRanks, Observation, Reply
from unicron_lib.controller.client import ControllerClient
from unicron_lib.controller.views import NodeView
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import Layout
from unicron_lib.errors import ControllerError

T = TypeVar("T")
HERE = Path(__file__).parent
DEADLINE_S = 60.0


async def eventually(ask: Callable[[], Awaitable[T | None]], what: str) -> T:
    """The first answer that is true; there is nothing to wait on across processes."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with suppress(ControllerError):
            if answer := await ask():
                return answer
        await asyncio.sleep(0.02)
    raise AssertionError(f"{what}: not within {DEADLINE_S} s")


class LocalCluster:
    def __init__(self, directory: Path, *, certificate: Path | None = None) -> None:
        """With `certificate`, a PEM file with key and certificate, the controller speaks TLS."""
        self.directory = directory
        self.certificate = certificate
        self.token = secrets.token_hex(16)
        self.token_file = directory / "token"
        self.token_file.write_text(self.token)
        self.port = free_port()
        self.store_url = f"file://{directory}/store"
        create_store(self.store_url)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        s = "s" if certificate else ""
        self.agents_url = f"ws{s}://127.0.0.1:{self.port}/v1/agents"
        self.client = ControllerClient(f"http{s}://127.0.0.1:{self.port}", self.token)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"PYTHONPATH": str(HERE)}
        with (self.directory / f"{name}.log").open("ab") as out:
            process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=out, stderr=out, env=env)
        self.processes.append(process)
        return process

    async def start_controller(self) -> subprocess.Popen[bytes]:
        process = self._start(
            "controller",
            "unicron_lib.controller",
            *("--port", str(self.port), "--token-file", str(self.token_file), "--store-url", self.store_url),
            *(("--ssl-certfile", str(self.certificate)) if self.certificate else ()),
        )
        await eventually(self.client.health, "the controller answers")
        return process

    def start_agent(self, node: str = "n0", *more: str, token_file: Path | None = None) -> subprocess.Popen[bytes]:
        agent = self._start(
            node,
            "unicron_lib.agent",
            *("--controller", self.agents_url, "--token-file", str(token_file or self.token_file)),
            *("--node", node, "--address", "127.0.0.1", "--num-gpus", "2", "--run-dir", str(self.directory / "run")),
            *("--interface", "lo", "--rank-target", "fake_rank:main", "--rendezvous-target", "fake_rank:rendezvous"),
            *("--imagined-gpus", "--kernel-log", "none", "--spot-notices", "off", *more),
        )
        self.agents.append(agent)
        return agent

    async def node(self, name: str = "n0", **wanted: object) -> NodeView:
        """The node once it is connected and has the `wanted` attributes."""
        wanted = {"connected": True, **wanted}

        async def ask() -> NodeView | None:
            nodes = {node.node: node for node in await self.client.nodes()}
            found = nodes.get(name)
            return found if found and all(getattr(found, key) == value for key, value in wanted.items()) else None

        return await eventually(ask, f"node {name} is {wanted}")

    async def observation(self, kind: str, job: str | None = None) -> Observation:
        """The first observation of that kind that waits."""

        async def ask() -> Observation | None:
            waiting = await self.client.observations(job=job, wait_s=1.0)
            return next((observation for observation in waiting if observation.body.type == kind), None)

        return await eventually(ask, f"an observation {kind}")

    async def launch(self, behaviour: str = "step", *, node: str = "n0", ranks: int = 2, **more: object) -> Reply:
        reply = await self.client.command(node, launch(behaviour, ranks=ranks, **more))
        assert reply.ok, reply.error
        return reply

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def close(self) -> None:
        await self.client.aclose()
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT if process in self.agents else signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@asynccontextmanager
async def running(directory: Path, *, certificate: Path | None = None) -> AsyncIterator[LocalCluster]:
    """A controller and one agent, n0; nothing of it is left at the end."""
    cluster = LocalCluster(directory, certificate=certificate)
    try:
        await cluster.start_controller()
        cluster.start_agent()
        await cluster.node()
        yield cluster
    finally:
        await cluster.close()
    left = [p for p in psutil.process_iter(["cmdline"]) if str(directory) in " ".join(p.info["cmdline"] or ())]
    assert not left


def launch(behaviour: str = "step", *, ranks: int = 2, generation: int = 1, job: str = "a", **more: object) -> LaunchRanks:
    """The command; `ranks_at` are its pairs (rank, gpu), by default `ranks` of them from 0."""
    where = more.pop("ranks_at", tuple((rank, rank) for rank in range(ranks)))
    values = {
        "step": f"launch-{job}-{generation}",
        "job": job,
        "generation": generation,
        "spec": JobSpec(job=job, data_path=f"fake:{behaviour}"),
        "layout": Layout(dp=ranks),
        "ranks": where,
        "world_size": ranks,
        "node_rank": 0,
        "num_nodes": 1,
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "store_url": "file:///nowhere",
    }
    return LaunchRanks(**values | more)


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def pids(reply: Reply) -> list[int]:
    listed = reply.result["pids"]
    assert isinstance(listed, list)
    return [entry["pid"] for entry in listed]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
