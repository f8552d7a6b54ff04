"""A whole cluster on this machine: every part a real process. Control processes are restarted, nodes are not."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from unicron_lib.adapters.stores import create_store
from unicron_lib.agent.access import read_token
from unicron_lib.controller.client import ControllerClient
from unicron_lib.errors import ControllerError, UnicronError, UserError
from unicron_lib.local.processes import Program, start, sweep, tail
from unicron_lib.local.programs import agent_program, control_programs, store_program
from unicron_lib.local.site import Site

RESTART_PAUSE_S = 0.5
READY_S = 180.0
LOOK_S = 0.1
TELL_S = 10.0
USAGE = 2
Say = Callable[[str], None]


class StartFailed(UnicronError):
    """A part of the local cluster did not come up: its last words."""


class LocalCluster:
    """Starts, watches and stops the processes of `site`."""

    def __init__(self, site: Site, say: Say) -> None:
        self.site = site
        self._say = say
        self._env = site.environment()
        self._control: dict[str, tuple[Program, subprocess.Popen[bytes]]] = {}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the control processes and the agents, by name."""
        control = {name: process.pid for name, (_, process) in self._control.items()}
        return {**control, **{name: process.pid for name, process in self._agents.items()}}

    def controller(self) -> ControllerClient:
        """A client of the cluster's controller."""
        return ControllerClient(self.site.controller_url, read_token(self.site.token_file))

    async def start(self, prefect_file: Path) -> None:
        """Start everything; returns when all nodes have joined and the flows are deployed. Raises StartFailed."""
        for node in self.site.nodes:
            self.start_node(node)
        if self.site.s3_port:
            self._start_control(store_program(self.site))
            await self._until("the S3 server", self._store_answers)
        await asyncio.to_thread(create_store, self.site.store_url)
        for program in control_programs(self.site):
            self._start_control(program)
        self._keeper = asyncio.create_task(self._keep())
        await self._until("the Prefect server, while the nodes import torch and megatron", self._prefect_answers)
        self._say(f"Prefect UI at {self.site.ui_url}")
        await self.deploy("--store-url", self.site.store_url, str(prefect_file))
        await self._until("the nodes", self._all_joined)
        self._say(f"{len(self.site.nodes)} nodes with {self.site.gpus_per_node} ranks each have joined")

    def start_node(self, node: str) -> None:
        """Start the agent of `node` if it is not running."""
        process = self._agents.get(node)
        if process is None or process.poll() is not None:
            self._agents[node] = start(agent_program(self.site, node), self._env)

    def start_missing_nodes(self) -> None:
        """Bring back every node whose agent is gone."""
        for node in self.site.nodes:
            self.start_node(node)

    async def deploy(self, *arguments: str) -> list[Any]:
        """Run `flows.deployments` with `arguments`; what it printed."""
        return await deploy(self._env, *arguments)

    async def stop(self) -> None:
        """End every process, politely where there is time; nothing is left."""
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        control = [process for _, process in self._control.values()]
        for process in self._agents.values():
            process.send_signal(signal.SIGINT)  # on SIGTERM they would wait until their jobs have moved
        for process in control:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.to_thread(sweep, self.site.cluster_id, grace_s=5.0)
        for process in (*self._agents.values(), *control):
            process.wait()

    def _start_control(self, program: Program) -> None:
        self._control[program.name] = (program, start(program, self._env))

    async def _keep(self) -> None:
        """Restart control processes that died."""
        while True:
            await asyncio.sleep(LOOK_S)
            for name, (program, process) in list(self._control.items()):
                if process.poll() is not None:
                    self._say(f"{name} ended with {process.returncode}: starting it again")
                    await asyncio.sleep(RESTART_PAUSE_S)
                    self._start_control(program)

    async def _until(self, what: str, ready: Callable[[], Awaitable[bool]]) -> None:
        deadline, told = time.monotonic() + READY_S, time.monotonic()
        while not await ready():
            if time.monotonic() > deadline:
                raise StartFailed(f"{what} did not come up within {READY_S:.0f} s: see {self.site.logs}")
            if time.monotonic() > told + TELL_S:
                self._say(f"waiting for {what}")
                told = time.monotonic()
            self._raise_if_dead()
            await asyncio.sleep(LOOK_S)

    def _raise_if_dead(self) -> None:
        if self._keeper is None:
            return
        for node, process in self._agents.items():
            if process.poll() is not None:
                words = tail(self.site.logs / f"{node}.log")
                raise StartFailed(f"the agent of {node} ended with {process.returncode}:\n{words}")

    async def _store_answers(self) -> bool:
        return await _answers(f"http://127.0.0.1:{self.site.s3_port}/")

    async def _prefect_answers(self) -> bool:
        return await _answers(f"{self.site.ui_url}/api/health")

    async def _all_joined(self) -> bool:
        try:
            nodes = await self.controller().nodes()
        except ControllerError:
            return False
        return len([node for node in nodes if node.connected]) == len(self.site.nodes)


async def deploy(env: Mapping[str, str], *arguments: str) -> list[Any]:
    """Run `flows.deployments` in a process of its own (importing Prefect takes seconds). Raises UserError, StartFailed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "flows.deployments", *arguments, env=dict(env), stdout=-1, stderr=-1
    )
    out, err = await process.communicate()
    if process.returncode:
        words = err.decode(errors="replace").strip().splitlines()
        told = words[-1].removeprefix("unicron: ") if words else "the deployment failed without a word"
        raise UserError(told) if process.returncode == USAGE else StartFailed(told)
    result: list[Any] = json.loads(out.decode().splitlines()[-1])
    return result


async def _answers(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=2) as client:
            return (await client.get(url)).status_code < 500
    except httpx.HTTPError:
        return False


@contextlib.asynccontextmanager
async def running(site: Site, say: Say, prefect_file: Path) -> AsyncIterator[LocalCluster]:
    """The started cluster; stopped on the way out, whatever happens."""
    cluster = LocalCluster(site, say)
    try:
        await cluster.start(prefect_file)
        yield cluster
    finally:
        await asyncio.shield(cluster.stop())
