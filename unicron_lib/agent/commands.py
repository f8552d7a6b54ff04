"""Carries out the controller's commands: each at most once in effect, none for a replaced generation."""

import asyncio
import logging
from collections import defaultdict
from typing import assert_never

from unicron_lib.agent.checks import NodeChecks
from unicron_lib.agent.command_rank import told_of_checkpoints
from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.holding import hold, lives_on
from unicron_lib.agent.injection import Injection
from unicron_lib.agent.inquiries import CheckNode, ReadLog
from unicron_lib.agent.memo import StepMemo
from unicron_lib.agent.memory import NodeMemory
from unicron_lib.agent.memory_messages import FetchMemory, FindMemory, ForgetMemory, SaveCheckpoint
from unicron_lib.agent.messages import (
    Command,
    DrainRanks,
    HoldRanks,
    LaunchRanks,
    OfRanks,
    OpenRendezvous,
    Reply,
    SaveReplica,
    StopRanks,
)
from unicron_lib.agent.rank_logs import read_log
from unicron_lib.agent.rank_messages import RankOrder
from unicron_lib.agent.ranks import Phase, Rank
from unicron_lib.agent.rendezvous import RendezvousStores
from unicron_lib.agent.slot_places import keepers
from unicron_lib.agent.supervisor import Supervisor
from unicron_lib.domain.events import Scalar
from unicron_lib.errors import AgentError, StaleGeneration, UnicronError

log = logging.getLogger(__name__)
Result = dict[str, Scalar | list[dict[str, Scalar]]]


class Commands:
    """Answers commands; a step that is asked for again is joined, or answered as before."""

    def __init__(
        self,
        *,
        supervisor: Supervisor,
        stores: RendezvousStores,
        checks: NodeChecks,
        injection: Injection,
        memory: NodeMemory,
        fence: Fence,
    ) -> None:
        self._supervisor = supervisor
        self._stores = stores
        self._checks = checks
        self._injection = injection
        self._memory = memory
        self._fence = fence
        self._launchable = Fence()
        self._memo = StepMemo()
        self._running: dict[str, asyncio.Task[Reply]] = {}
        self._launching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def answer(self, command: Command) -> Reply:
        """Carry out `command` unless its step is done or being done; never raises for a refusal."""
        step = command.step
        if step not in self._running:
            self._running[step] = asyncio.create_task(self._answer(command))
            self._running[step].add_done_callback(lambda _: self._running.pop(step, None))
        return await asyncio.shield(self._running[step])

    async def _answer(self, command: Command) -> Reply:
        step = command.step
        try:
            self._admit(command)
            reply = self._memo.recall(step) or Reply(step=step, ok=True, result=await self._carry_out(command))
        except StaleGeneration as error:
            return Reply(step=step, ok=False, error=str(error), stale=True)
        except (UnicronError, OSError) as error:
            log.warning("step %s failed: %s", step, error)
            return Reply(step=step, ok=False, error=str(error))
        except Exception as error:
            log.exception("step %s failed", step)
            return Reply(step=step, ok=False, error=f"{type(error).__name__}: {error}; see the agent's log")
        if not isinstance(command, ReadLog | FindMemory):  # they change nothing, and what they find may change
            self._memo.keep(reply)
        return reply

    def _admit(self, command: Command) -> None:
        """Refuse a replaced generation; starting or stopping for a newer one replaces the older ones.

        From the moment that a newer one parts from their ranks, what these have and save is counted on: none may be launched.
        """
        match command:
            case OpenRendezvous() | LaunchRanks() | CheckNode() | FetchMemory() | SaveCheckpoint():
                generation = command.generation
            case SaveReplica():
                generation = max(command.generation, command.as_generation or 0)
            case DrainRanks() | HoldRanks() | StopRanks():
                generation = command.below_generation
            case InjectFault() | ReadLog() | FindMemory() | ForgetMemory():
                return
        self._check(command.job, generation)
        if isinstance(command, OpenRendezvous | LaunchRanks):
            self._refuse_if_parted(command.job, generation)
        if isinstance(command, OpenRendezvous | LaunchRanks | StopRanks):
            self._fence.raise_to(command.job, generation)
        if isinstance(command, DrainRanks | HoldRanks):
            self._launchable.raise_to(command.job, generation)

    def _check(self, job: str, generation: int) -> None:
        if not self._fence.admits(job, generation):
            raise StaleGeneration(self._fence.refusal(job, generation))

    def _refuse_if_parted(self, job: str, generation: int) -> None:
        """Raise StaleGeneration if a newer plan parts from the job's ranks: the one that launches was given up."""
        if not self._launchable.admits(job, generation):
            raise StaleGeneration(self._launchable.refusal(job, generation))

    async def _carry_out(self, command: Command) -> Result:
        match command:
            case CheckNode():
                return await self._check_node(command)
            case FindMemory() | FetchMemory() | ForgetMemory():
                return await self._memory.carry_out(command)
            case ReadLog():
                return {**await read_log(self._supervisor.facts, command)}
            case InjectFault():
                return {**self._injection.carry_out(command)}
            case _:
                return await self._do_with_ranks(command)

    async def _do_with_ranks(self, command: OpenRendezvous | OfRanks) -> Result:
        match command:
            case OpenRendezvous():
                doing = self._open_rendezvous(command)
            case LaunchRanks():
                doing = self._launch(command)
            case DrainRanks():
                doing = self._drain(command)
            case HoldRanks():
                doing = self._hold(command)
            case SaveCheckpoint():
                return self._save(command)
            case SaveReplica():
                doing = self._save_replica(command)
            case StopRanks():
                doing = self._stop(command)
            case _:
                assert_never(command)
        return await doing

    async def _open_rendezvous(self, command: OpenRendezvous) -> Result:
        await self._supervisor.ready()
        async with self._launching[command.job]:
            self._check(command.job, command.generation)
            port = await self._stores.open(command.job, command.generation)
        told = await told_of_checkpoints(self._supervisor.facts, command.spec)
        return {"address": self._supervisor.facts.address, "port": port, **({"checkpoint": told} if told else {})}

    async def _launch(self, command: LaunchRanks) -> Result:
        pids: list[dict[str, Scalar]] = []
        await self._checks.give_up()
        await self._supervisor.ready()
        parts = keepers(command.layout, dict(command.ranks))
        self._memory.follow(command.job, command.memory_peers, parts, generation=command.generation)
        async with self._launching[command.job]:
            await self._close_orphaned_stores(command.job)
            for rank, gpu in command.ranks:
                self._check(command.job, command.generation)
                self._refuse_if_parted(command.job, command.generation)
                started = await self._supervisor.launch(command, rank, gpu)
                pids.append({"rank": rank, "pid": started.pid})
            left = [rank for rank in self._supervisor.ranks.below(command.job, command.generation) if rank.held_for]
            await self._supervisor.end(left, grace_s=0.0)
        return {"pids": pids}

    async def _check_node(self, command: CheckNode) -> Result:
        if self._supervisor.ranks.alive:
            jobs = ", ".join(sorted({rank.job for rank in self._supervisor.ranks.alive}))
            raise AgentError(f"ranks of {jobs} live on {self._supervisor.facts.node}: only a node without ranks is checked")
        return await self._checks.run(command)

    async def _close_orphaned_stores(self, job: str) -> None:
        """End stores of replaced generations that have no ranks here any more."""
        floor = self._fence.oldest(job)
        used = {(rank.job, rank.generation) for rank in self._supervisor.ranks.alive}
        await self._stores.close(lambda of, number: of == job and number < floor and (of, number) not in used, grace_s=1.0)

    async def _drain(self, command: DrainRanks) -> Result:
        ranks = self._supervisor.ranks.below(command.job, command.below_generation)
        for rank in ranks:
            if rank.is_alive and rank.phase is Phase.RUNNING:
                self._supervisor.drain(rank)
        settled = lambda: all(_drain_state(rank) != "busy" for rank in ranks)  # noqa: E731
        await self._supervisor.bell.until(settled, timeout_s=command.deadline_s)
        return {"ranks": [_describe(rank) for rank in ranks]}

    async def _hold(self, command: HoldRanks) -> Result:
        ranks = await hold(self._supervisor, command)
        return {"ranks": [{**_describe(rank), "gpu": rank.gpu, "micro_batches": rank.micro_batches} for rank in ranks]}

    def _save(self, command: SaveCheckpoint) -> Result:
        rank = self._find(command.job, command.generation, 0)
        if rank.phase is not Phase.RUNNING or rank.is_command:
            raise AgentError(f"rank 0 of job {rank.job} is {rank.phase}, only one that trains can save: try again in a while")
        rank.order(RankOrder(order="save"))
        return {"iteration": rank.iteration}

    async def _save_replica(self, command: SaveReplica) -> Result:
        rank = self._find(command.job, command.generation, command.rank)
        if rank.phase is not Phase.PARKED:
            raise AgentError(f"rank {rank.rank} of job {rank.job} is {rank.phase}, only a parked rank can save its replica")
        if not rank.manifest:
            # a part of a replica counts only with those that others save now
            rank.manifest, rank.has_answered = None, False
            writes_as = {} if command.as_generation is None else {"UNICRON_GENERATION": str(command.as_generation)}
            rank.order(RankOrder(order="save_replica", environment=writes_as))
        done = lambda: rank.has_answered or rank.judged  # noqa: E731
        await self._supervisor.bell.until(done, timeout_s=command.deadline_s)
        if rank.manifest is None:
            raise AgentError(f"rank {rank.rank} of job {rank.job} {_why_unsaved(rank, command)}: take another one")
        return {"iteration": rank.iteration, "manifest": rank.manifest}

    async def _stop(self, command: StopRanks) -> Result:
        job, floor = command.job, command.below_generation
        async with self._launching[job]:  # a launch that runs is let finish its rank, so that none escapes
            old = self._supervisor.ranks.below(job, floor)
        ending = [rank for rank in old if not lives_on(rank, command)]
        stopped = await self._supervisor.end(ending, grace_s=command.grace_s)
        stopped += await self._stores.close(lambda of, number: of == job and number < floor, grace_s=command.grace_s)
        return {"stopped": stopped}

    def _find(self, job: str, generation: int, rank: int) -> Rank:
        found = self._supervisor.ranks.find(job, generation, rank)
        if found is None or not found.is_alive:
            raise AgentError(f"rank {rank} of job {job}, generation {generation}, does not live on this node: take another one")
        return found


def _why_unsaved(rank: Rank, command: SaveReplica) -> str:
    if not rank.is_alive:
        return "died while it saved its replica"
    if rank.has_answered:
        return "has no state, or not all parts of it were saved"
    return f"is busy for longer than {command.deadline_s:g} s while it saves its replica"


def _drain_state(rank: Rank) -> str:
    if rank.phase is Phase.DRAINED:
        return "drained"
    if rank.judged or rank.phase in {Phase.FAILED, Phase.FINISHED}:
        return "gone"
    # A rank that has just died may have said something that is not read yet.
    return "parked" if rank.phase is Phase.PARKED and rank.is_alive else "busy"


def _describe(rank: Rank) -> dict[str, Scalar]:
    return {
        "rank": rank.rank,
        "generation": rank.generation,
        "state": _drain_state(rank),
        "iteration": rank.iteration,
        "manifest": rank.manifest,
    }
