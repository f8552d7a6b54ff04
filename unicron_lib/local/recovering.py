"""A local cluster whose jobs are hurt on purpose, to measure what that costs them."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil
import yaml

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus
from unicron_lib.domain.events import FaultInjected, submitted
from unicron_lib.domain.jobs import JobSpec
from unicron_lib.domain.plans import StepKind
from unicron_lib.errors import ControllerError
from unicron_lib.journal import Journal
from unicron_lib.local.cluster import LocalCluster
from unicron_lib.local.iterations import IterationWatch
from unicron_lib.local.strikes import PATIENCE_S, BenchStopped
from unicron_lib.training.ledger import ledger_directory

LOOK_S = 0.1
AHEAD_S = 0.05
"""The journal is told of a fault before it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that was done: when, by the clock of the watches, and what the cluster knew before."""

    at: float
    wall: float
    incidents: frozenset[str]


class Patients:
    """The jobs of a local cluster, with a watch on the iterations of each."""

    def __init__(self, cluster: LocalCluster, *, look_s: float = 0.005) -> None:
        self.cluster = cluster
        self.watches: dict[str, IterationWatch] = {}
        self._look_s = look_s
        self._journal = Journal(open_store(cluster.site.store_url))
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    async def submit(self, spec: JobSpec, *, gpus: int) -> None:
        """Start a job, and wait until it trains on so many GPUs. Raises BenchStopped."""
        path = _job_file(self.cluster.site.path, spec)
        (run,) = await self.cluster.deploy("--run", str(path))
        event = submitted(spec, submission=run["flow_run"], at=time.time())
        await asyncio.to_thread(self._journal.append, event)
        watch = IterationWatch(ledger_directory(self.cluster.site.run_dir, spec.job), look_s=self._look_s)
        self.watches[spec.job] = self._open.enter_context(watch)
        await self.calm({spec.job: gpus})
        await self._watched(spec.job)

    async def _watched(self, job: str) -> None:
        async with self.cluster.controller() as client:
            deadline = time.monotonic() + PATIENCE_S
            while job not in await client.watchers():
                if time.monotonic() > deadline:
                    raise BenchStopped(f"waited {PATIENCE_S:.0f} s in vain for the train run of {job}")
                await asyncio.sleep(LOOK_S)

    async def calm(self, sizes: Mapping[str, int]) -> ClusterState:
        """Wait until nothing is open and these jobs have so many GPUs. Raises BenchStopped."""

        def holds(state: ClusterState) -> bool:
            is_calm = state.active_plan is None and not state.open_incidents
            return is_calm and all(job in state.jobs and state.jobs[job].gpus == gpus for job, gpus in sizes.items())

        told = ", ".join(f"{job} on {gpus} GPUs" for job, gpus in sizes.items())
        return await self.until(holds, told)

    async def healed(self, struck: Struck) -> tuple[ClusterState, Incident]:
        """Wait until the failure that followed is healed. Raises BenchStopped."""
        state = await self.until(lambda state: bool(_closed(state, struck)) and state.active_plan is None, "a healed failure")
        return state, min(_closed(state, struck), key=lambda it: it.opened_at)

    async def until(self, holds: Callable[[ClusterState], bool], what: str) -> ClusterState:
        """The journal's state once `holds` of it. Raises BenchStopped."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds(state := await self.state()):
            if time.monotonic() > deadline:
                raise BenchStopped(f"waited {PATIENCE_S:.0f} s in vain for {what}: logs are in {self.cluster.site.logs}")
            await asyncio.sleep(LOOK_S)
        return state

    async def state(self) -> ClusterState:
        """What the journal says now."""
        return await asyncio.to_thread(self._journal.refresh)

    async def kill_rank(self, job: str, rank: int) -> Struck:
        """SIGKILL of a rank."""
        pid = await self._pid(job, rank)
        return await self._strike("crash", f"{job}/{rank}", lambda: os.kill(pid, 9))

    async def raise_in(self, job: str, rank: int, text: str) -> Struck:
        """An exception in a rank, at the end of its own part of an iteration."""
        node = await self._node(job, rank)
        struck = await self._strike("exception", f"{job}/{rank}", lambda: None)
        command = InjectFault(step=f"bench/{struck.wall:.6f}", fault="exception", job=job, rank=rank, text=text)
        async with self.cluster.controller() as client:
            await client.command(node, command)
        return struck

    async def kill_node(self, node: str) -> Struck:
        """SIGKILL of an agent and of all that it has started."""
        agent = psutil.Process(self.cluster.pids[node])
        everyone = [agent, *agent.children(recursive=True)]

        def kill() -> None:
            for process in everyone:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

        return await self._strike("node-loss", node, kill)

    async def _strike(self, kind: str, target: str, harm: Callable[[], None]) -> Struck:
        known = frozenset((await self.state()).incidents)
        wall = time.time() + AHEAD_S
        event = FaultInjected(id=f"fault/{target}/{wall:.6f}", at=wall, kind=kind, target=target)
        await asyncio.to_thread(self._journal.append, event)
        await asyncio.sleep(max(0.0, wall - time.time()))
        at = time.monotonic()
        harm()
        return Struck(at=at, wall=wall, incidents=known)

    async def _pid(self, job: str, rank: int) -> int:
        generation = (await self.state()).jobs[job].generation
        async with self.cluster.controller() as client:
            nodes = await client.nodes()
        ranks = [it for node in nodes for it in node.ranks]
        found = [it.pid for it in ranks if (it.job, it.generation, it.rank) == (job, generation, rank)]
        if not found:
            raise BenchStopped(f"no agent runs rank {rank} of {job}, generation {generation}")
        return found[0]

    async def _node(self, job: str, rank: int) -> str:
        assignment = (await self.state()).jobs[job].assignment
        assert assignment is not None
        return assignment.slots[rank].node


def told_of_plan(state: ClusterState, incident: Incident, job: str, kind: StepKind, key: str) -> int | None:
    """A number that the steps of that kind, for `job`, of the incident's plan told; None if none did."""
    if (plan := state.plans.get(incident.plan or "")) is None:
        return None
    steps = [step for step in plan.plan.steps if (step.kind, step.job) == (kind, job)]
    told = [found for step in steps if (found := plan.results.get(step.id, {}).get(key)) is not None]
    return sum(map(int, told)) if told else None


def _closed(state: ClusterState, struck: Struck) -> Sequence[Incident]:
    new = (incident for name, incident in state.incidents.items() if name not in struck.incidents)
    return [it for it in new if it.is_failure and it.status is IncidentStatus.CLOSED and it.plan]


def _job_file(home: Path, spec: JobSpec) -> Path:
    usual = asdict(JobSpec(job=spec.job))
    keys = {"job": spec.job} | {key: value for key, value in asdict(spec).items() if value != usual[key]}
    entry = {"name": spec.job, "entrypoint": "flows.training.train", "parameters": {"job": keys}, "pull": []}
    path = home / f"{spec.job}.yaml"
    text = {"name": spec.job, "deployments": [{**entry, "work_pool": {"name": "unicron"}}]}
    path.write_text(yaml.safe_dump(text))
    return path


async def copy_s(cluster: LocalCluster, job: str) -> float:
    """How long the longest copy of state took when the job's generation began, as its ranks tell."""
    async with cluster.controller() as client:
        with suppress(ControllerError):
            live = await client.job_progress(job)
            return max((origin.copy_s for origin in live.origins.values()), default=0.0) if live else 0.0
    return 0.0
