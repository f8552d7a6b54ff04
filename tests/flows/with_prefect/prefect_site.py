"""A real Prefect server on SQLite beside a cluster of fakes, and the warm recovery service in the test's own process."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml
from fake_site import FakeAgents, FakeController
from prefect import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import FlowRun

from flows.deployments import load, register
from flows.service import RecoveryService
from unicron_lib.agent.messages import Observation

ROOT = Path(__file__).parents[3]
PATIENCE_S = 90.0
SERVER = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--log-level", "warning")


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def serving(home: Path) -> Iterator[Server]:
    """A fresh Prefect server; gone at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
        "DO_NOT_TRACK": "1",
    }
    with (home / "server.log").open("wb") as out:
        arguments = [sys.executable, *SERVER, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(arguments, env=env, stdout=out, stderr=out)
    try:
        _wait_until_healthy(env["PREFECT_API_URL"], process, home / "server.log")
        yield Server(env["PREFECT_API_URL"], process)
    finally:
        process.kill()
        process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    transport = httpx.HTTPTransport(retries=0)
    with httpx.Client(transport=transport, timeout=2.0) as client:
        while True:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/health").is_success:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)


@dataclass
class WholeController(FakeController):
    """Also has observations that wait for somebody, each until it is acknowledged."""

    agents: FakeAgents
    waiting: dict[str, Observation] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, *observations: Observation) -> None:
        self.waiting |= {observation.id: observation for observation in observations}
        self.news.set()

    async def observations(self, *, wait_s: float, job: str | None = None, min_age_s: float = 0.0) -> tuple[Observation, ...]:
        if not self.waiting:
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.news.wait()
        return tuple(self.waiting.values())

    async def acknowledge(self, ids) -> int:
        return sum(self.waiting.pop(name, None) is not None for name in list(ids))

    async def watchers(self) -> dict[str, float]:
        return {"gpt-a": 0.0, "gpt-b": 0.0}


@contextlib.asynccontextmanager
async def recovery_service() -> AsyncIterator[RecoveryService]:
    """The warm service, as long as the block runs."""
    service = RecoveryService()
    serving = asyncio.create_task(service.serve())
    try:
        yield service
        assert not serving.done(), "the service ended"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def until(what: str, holds) -> None:
    """Poll what nobody announces; `holds` may be a coroutine function."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)  # a poll of a real, remote condition
    raise AssertionError(what)


async def runs_of(deployment: str) -> list[FlowRun]:
    """All flow runs of the deployment, oldest first."""
    async with get_client() as client:
        named = DeploymentFilter(name=DeploymentFilterName(any_=[deployment]))
        runs = await client.read_flow_runs(deployment_filter=named)
    return sorted(runs, key=lambda run: run.created)


async def register_quick(folder: Path, **trigger: object) -> None:
    """Deploy `prefect.yaml` with the shortest patience that Prefect allows its automation, and with these keys of it."""
    entries = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (present,) = entries["deployments"][0]["triggers"]
    present |= {"within": 10, **trigger}
    quick = folder / "quick.yaml"
    quick.write_text(yaml.safe_dump(entries))
    await register(load(quick))
