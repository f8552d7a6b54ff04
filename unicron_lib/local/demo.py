"""The main job: two trainings, a crash, a node loss, the node's return, and a job's end, all on real parts."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unicron_lib.adapters.stores import open_store
from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.domain.cluster import ClusterState, Incident, IncidentStatus, NodeStatus, PlanState
from unicron_lib.domain.events import FaultInjected, Scalar, submitted
from unicron_lib.domain.failures import Severity
from unicron_lib.domain.jobs import ENDED, JobSpec
from unicron_lib.domain.plans import PlanKind, StepKind
from unicron_lib.errors import ControllerError, UnicronError
from unicron_lib.jobfile import read_jobs
from unicron_lib.journal import Journal
from unicron_lib.local.checks import Check
from unicron_lib.local.cluster import LocalCluster, Say
from unicron_lib.report import headline

LOOK_S = 0.2
TELL_S = 10.0
PATIENCE_S = 180.0


class DemoFailed(UnicronError):
    """The cluster did not do what the demo waits for."""


@dataclass(slots=True)
class Demo:
    """The story; `checks` collects what was claimed on the way and whether it held."""

    cluster: LocalCluster
    files: Sequence[Path]
    say: Say
    checks: list[Check] = field(default_factory=list)
    journal: Journal = field(init=False)
    a: JobSpec = field(init=False)
    b: JobSpec = field(init=False)

    def __post_init__(self) -> None:
        self.journal = Journal(open_store(self.cluster.site.store_url))
        self.a, self.b = (read_jobs(file)[0] for file in self.files)

    async def play_faults(self) -> None:
        """Play the first three acts. Raises DemoFailed with what did not happen."""
        await self._submit()
        await self._crash_a_rank()
        node = await self._lose_a_node()
        await self._bring_back(node)

    async def play_end(self) -> ClusterState:
        """Play the last act and wait for both jobs; the state at the end. Raises DemoFailed."""
        await self._let_b_finish()
        return await self._until(
            "the end of both jobs",
            lambda state: _is_calm(state) and all(job.status in ENDED for job in state.jobs.values()),
        )

    async def _submit(self) -> None:
        runs = await self.cluster.deploy("--run", *(str(file) for file in self.files))
        for spec, run in zip((self.a, self.b), runs, strict=True):
            event = submitted(spec, submission=run["flow_run"], at=time.time())
            await asyncio.to_thread(self.journal.append, event)
        self.say(f"submitted {self.a.job} and {self.b.job}: each a Prefect deployment with a long-lived train run")
        full = self.cluster.site.num_nodes * self.cluster.site.gpus_per_node
        await self._until("both jobs on all GPUs", lambda state: _is_calm(state) and _gpus(state) == full)
        await self._wait("their train runs to watch them", self._are_watched)
        await self._iterate(3)
        await self._tell_sizes()

    async def _are_watched(self) -> bool:
        async with self.cluster.controller() as client:
            return {self.a.job, self.b.job} <= (await client.watchers()).keys()

    async def _crash_a_rank(self) -> None:
        state = await self._state()
        job = state.jobs[self.a.job]
        before_b = state.jobs[self.b.job]
        assert job.assignment is not None
        node = job.assignment.slots[1].node
        self.say(f"act 1: SIGKILL to rank 1 of {self.a.job} at {node}")
        incident = await self._harm(
            f"{self.a.job}/1", node, InjectFault(step="demo/crash", fault="crash", job=self.a.job, rank=1)
        )
        await self._iterate(3)
        state = await self._state()
        plan = state.plans[incident.plan or ""].plan
        after = plan.assignment_of(self.a.job)
        as_expected = (incident.kind, incident.severity, plan.kind) == ("process_exit", Severity.SEV2, PlanKind.RESTART)
        in_place = after is not None and after.slots == job.assignment.slots
        self._claim("a killed rank is SEV2 and restarts in place, without a new allocation", as_expected and in_place)
        source = str(_resumed(state.plans[plan.id], self.a.job).get("from"))
        self._claim("its survivors go on from their own memory: no iteration is lost", source.startswith("own memory"), source)
        after_b = state.jobs[self.b.job]
        self._claim(
            f"{self.b.job} never noticed",
            after_b.generation == before_b.generation and after_b.assignment == before_b.assignment,
        )

    async def _lose_a_node(self) -> str:
        state = await self._state()
        assignment = state.jobs[self.a.job].assignment
        assert assignment is not None
        node = assignment.nodes[-1]
        self.say(f"act 2: {node} is lost with the agent and both ranks of {self.a.job} on it")
        incident = await self._harm(node, node, InjectFault(step="demo/node-loss", fault="node-loss"))
        await self._iterate(3)
        state = await self._tell_sizes()
        plan = state.plans[incident.plan or ""].plan
        as_expected = (incident.kind, incident.severity, plan.kind) == ("node_lost", Severity.SEV1, PlanKind.REALLOCATE)
        solved = plan.optimal and plan.method == "milp"
        self._claim("a lost node is SEV1; cvxpy solved the allocation of both jobs to the optimum", as_expected and solved)
        sizes = {name: job.gpus for name, job in state.jobs.items()}
        healthy = state.num_healthy_gpus
        self._claim("both jobs go on with the GPUs that are left", min(sizes.values()) > 0 and sum(sizes.values()) <= healthy)
        return node

    async def _bring_back(self, node: str) -> None:
        self.say(f"act 3: {node} comes back")
        self.cluster.start_node(node)
        full = self.cluster.site.num_nodes * self.cluster.site.gpus_per_node
        await self._until(f"{node} joined", lambda state: state.nodes[node].status is NodeStatus.READY)
        await self._until("a plan with the returned node", lambda state: _is_calm(state) and _gpus(state) == full)
        await self._iterate(3)
        state = await self._tell_sizes()
        self._claim("all GPUs are in use again", sum(job.gpus for job in state.jobs.values()) == full)

    async def _let_b_finish(self) -> None:
        self.say(f"act 4: {self.b.job} runs to its last iteration, then its GPUs are free")
        await self._until(f"the end of {self.b.job}", lambda state: state.jobs[self.b.job].status in ENDED)
        state = await self._until("the plan after it", _is_calm)
        gpus = state.jobs[self.a.job].gpus
        self.say(f"{self.a.job} goes on with {gpus} GPUs")
        self._claim(f"the GPUs of {self.b.job} went to {self.a.job}, since that pays", gpus == max(self.a.throughput_flops))

    async def _harm(self, target: str, node: str, command: InjectFault) -> Incident:
        """Inject a fault; the closed incident that it caused."""
        known = set((await self._state()).incidents)
        at = time.time()
        event = FaultInjected(id=f"fault/{target}/{at:.6f}", at=at, kind=command.fault, target=target)
        await asyncio.to_thread(self.journal.append, event)
        try:
            await self.cluster.controller().command(node, command, timeout_s=5)
        except ControllerError:
            if command.fault != "node-loss":
                raise

        def healed(state: ClusterState) -> bool:
            return any(i.is_failure and i.status is IncidentStatus.CLOSED for i in new(state))

        def new(state: ClusterState) -> list[Incident]:
            return [incident for name, incident in state.incidents.items() if name not in known]

        state = await self._until(f"{command.fault} healed", healed)
        incident = next(i for i in new(state) if i.is_failure and i.status is IncidentStatus.CLOSED)
        self.say(f"healed: {incident.kind}, {headline(incident)}")
        return incident

    async def _iterate(self, count: int) -> None:
        """Wait until every running job has done `count` more iterations."""
        client = self.cluster.controller()
        start = {live.job: live.iteration for live in await client.progress()}
        running = [name for name, job in (await self._state()).jobs.items() if job.status not in ENDED]

        async def far_enough() -> bool:
            state = await self._state()
            now = {live.job: live.iteration for live in await client.progress()}
            going = [name for name in running if state.jobs[name].status not in ENDED]
            return all(name in now and now[name] >= start.get(name, 0) + count for name in going)

        await self._wait(f"{count} iterations of {', '.join(running)}", far_enough)

    async def _tell_sizes(self) -> ClusterState:
        state = await self._state()
        sizes = ", ".join(f"{name} on {job.gpus} GPUs" for name, job in sorted(state.jobs.items()))
        self.say(f"training: {sizes}")
        return state

    async def _state(self) -> ClusterState:
        return await asyncio.to_thread(self.journal.refresh)

    async def _until(self, what: str, holds: Callable[[ClusterState], bool]) -> ClusterState:
        async def ready() -> bool:
            return holds(await self._state())

        await self._wait(what, ready)
        return self.journal.state

    async def _wait(self, what: str, ready: Callable[[], Awaitable[bool]]) -> None:
        deadline, told = time.monotonic() + PATIENCE_S, time.monotonic()
        while not await ready():
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {PATIENCE_S:.0f} s in vain for {what}; logs are in {self.cluster.site.logs}")
            if time.monotonic() > told + TELL_S:
                self.say(f"waiting for {what}{await self._how_far()}")
                told = time.monotonic()
            await asyncio.sleep(LOOK_S)

    async def _how_far(self) -> str:
        async with self.cluster.controller() as client:
            progress = await client.progress()
        return "".join(f"; {it.job} at iteration {it.iteration + 1}, loss {it.loss:.2f}" for it in progress)

    def _claim(self, claim: str, holds: bool, detail: str = "") -> None:  # noqa: FBT001
        self.checks.append(Check(claim=claim, ok=holds, detail=detail))


def _resumed(progress: PlanState, job: str) -> Mapping[str, Scalar]:
    step = next(step for step in progress.plan.steps if step.kind is StepKind.RESUME and step.job == job)
    return progress.results[step.id]


def _gpus(state: ClusterState) -> int:
    return sum(job.gpus for job in state.jobs.values())


def _is_calm(state: ClusterState) -> bool:
    return state.active_plan is None and not state.open_incidents
