"""Takes in what ranks say and how they end, and makes observations of what nobody had asked for."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from unicron_lib.agent.bell import Bell
from unicron_lib.agent.command_rank import ALIVE_S, COMMAND_TARGET, command_environment, evidence, finished, still_alive
from unicron_lib.agent.environment import NodeFacts, error_file, log_file, rank_environment
from unicron_lib.agent.error_file import read_error_file
from unicron_lib.agent.excerpt import SHORT_LIMIT, excerpt
from unicron_lib.agent.forks import Forked, Forks
from unicron_lib.agent.forkserver import kill_group
from unicron_lib.agent.messages import Body, LaunchRanks, RankExited
from unicron_lib.agent.oom import OomWatch
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import (
    FromRank,
    Progress,
    RankDrained,
    RankFailed,
    RankFinished,
    RankHello,
    RankOrder,
    RankParked,
)
from unicron_lib.agent.ranks import Phase, Rank, Ranks
from unicron_lib.detection.sections import Limits
from unicron_lib.errors import AgentError

log = logging.getLogger(__name__)
RANK_TARGET = "unicron_lib.training.rank:main"
MAY_BE_OUT_OF_MEMORY = {-signal.SIGKILL, 128 + signal.SIGKILL}
"""Exit codes of a rank that the kernel may have killed for memory, also below a shell."""
TERMINATED = 128 + signal.SIGTERM
PLAIN = {0, 1}
"""Exit codes that tell nothing beyond what the rank has told itself."""


class Supervisor:
    """The ranks of a node from launch to end.

    `bell` rings at each change of a rank. `on_news` is called when there is something new for the controller: a
    rank's progress, or None for an observation in the outbox or a rank that came or went.
    """

    def __init__(
        self, *, facts: NodeFacts, forks: Forks, outbox: Outbox, oom: OomWatch, socket: Path, target: str = RANK_TARGET
    ) -> None:
        self.facts = facts
        self.ranks = Ranks()
        self.bell = Bell()
        self.on_news: Callable[[Progress | None], None] = lambda _: None
        self._forks = forks
        self._outbox = outbox
        self._socket = socket
        self._target = target
        self._oom = oom
        self._num_ended, self._num_cleared = 1, 0  # the first that has ended is the agent's former life
        self._endings: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        """Wait until ranks can be started at once; raises AgentError with the cause if they cannot.

        Nothing that an earlier rank or an earlier life of the agent has left behind is there any more.
        """
        await self._clear_orphans()
        await self._forks.ready()

    async def launch(self, command: LaunchRanks, rank: int, gpu: int) -> Rank:
        """Start a rank, or return the one that was started before; raises AgentError.

        A rank that was held for this generation, on the same GPU, becomes it instead, and keeps its memory.
        """
        known = self.ranks.find(command.job, command.generation, rank)
        if known:
            return known
        last_words = error_file(self.facts, command.job, command.generation, rank)
        last_words.parent.mkdir(parents=True, exist_ok=True)
        last_words.unlink(missing_ok=True)
        held = self._held(command, gpu)
        started = self._assign(held, command, rank) if held else await self._fork(command, rank, gpu)
        self.on_news(None)
        return started

    def _held(self, command: LaunchRanks, gpu: int) -> Rank | None:
        """The rank that waits on a GPU to live on in the generation that is launched."""
        held = self.ranks.where(lambda it: (it.job, it.held_for, it.gpu) == (command.job, command.generation, gpu))
        return next((rank for rank in held if rank.is_parked), None)

    def _assign(self, held: Rank, command: LaunchRanks, number: int) -> Rank:
        before = held.key
        self.ranks.renew(held, generation=command.generation, number=number, limits=Limits.of(command.spec))
        held.world_size, held.needs_peers = command.world_size, _needs_peers(command)
        environment = self._environment(command, number, keeps_device=True)
        held.order(RankOrder(order="assign", environment=environment))
        log.info("rank %s with pid %d lives on as rank %s", before, held.pid, held.key)
        return held

    async def _fork(self, command: LaunchRanks, rank: int, gpu: int) -> Rank:
        limits, is_command = Limits.of(command.spec), bool(command.spec.command)
        new = Rank(job=command.job, generation=command.generation, rank=rank, gpu=gpu, limits=limits)
        new.is_command, new.world_size, new.needs_peers = is_command, command.world_size, _needs_peers(command)
        self.ranks.add(new)
        try:
            new.process = await self._forks.spawn(
                target=COMMAND_TARGET if is_command else self._target,
                env=self._environment(command, rank),
                log_file=log_file(self.facts, new.job, new.generation, f"r{rank}"),
                on_exit=partial(self._exited, new),
            )
        except BaseException:
            self.ranks.forget(new)
            raise
        log.info("started rank %s with pid %d", new.key, new.pid)
        if is_command:
            asyncio.get_running_loop().call_later(ALIVE_S, self._vouch, new)
        return new

    def _environment(self, command: LaunchRanks, rank: int, *, keeps_device: bool = False) -> dict[str, str]:
        variables = rank_environment(self.facts, command, rank, self._socket, keeps_device=keeps_device)
        return command_environment(self.facts, command, variables) if command.spec.command else variables

    def _vouch(self, rank: Rank) -> None:
        """Say of a command that has not spoken for itself that it runs."""
        runs = rank.phase is Phase.RUNNING and (rank.is_alive or rank.ended_well)
        if runs and rank.progress is None and not rank.asked_to_stop:
            self.hear(rank, still_alive(rank))

    def hear(self, rank: Rank, message: FromRank) -> None:
        """Take in what a rank said."""
        match message:
            case RankHello():
                rank.parks = rank.parks or message.parks
            case Progress():
                rank.iteration, rank.progress = message.iteration, message
                self.on_news(message)
            case RankFailed():
                rank.phase = Phase.PARKED if message.parked else Phase.FAILED
                rank.iteration = message.iteration
                news = rank.repeats.news(bounded(message))
                if news is None:
                    return
                self._observe(rank, news)
            case RankParked():
                rank.phase, rank.iteration, rank.micro_batches = Phase.PARKED, message.iteration, message.micro_batches
            case RankDrained():
                rank.phase = rank.phase if rank.phase is Phase.PARKED else Phase.DRAINED
                rank.iteration, rank.manifest, rank.has_answered = message.iteration, message.manifest, True
            case RankFinished():
                rank.phase, rank.iteration = Phase.FINISHED, message.iteration
                self._observe(rank, message)
        self.bell.ring()

    def drain(self, rank: Rank) -> None:
        """Ask a rank to stop with its work saved; a command without a session by SIGTERM."""
        rank.asked_to_stop = rank.is_command  # from now on its end is no news, however it comes
        if rank.writer is not None or not rank.is_command:
            rank.order(RankOrder(order="drain"))
        elif rank.is_alive and rank.pid:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGTERM)

    async def stop(self, ranks: Iterable[Rank], *, grace_s: float) -> int:
        """End ranks, the obstinate ones with SIGKILL after `grace_s`; the number that had to be ended."""
        living = [rank for rank in ranks if rank.is_alive]
        for rank in living:
            rank.asked_to_stop = True
            if rank.phase is Phase.PARKED:
                rank.order(RankOrder(order="quit"))
        await end_processes([rank.process for rank in living if rank.process], grace_s=grace_s)
        with suppress(AgentError):  # that they end is insisted on when ranks are started
            await self._clear_orphans()
        return len(living)

    async def end(self, ranks: Iterable[Rank], *, grace_s: float) -> int:
        """`stop` them, and drop them from the table."""
        ranks = tuple(ranks)
        stopped = await self.stop(ranks, grace_s=grace_s)
        for rank in ranks:
            self.ranks.forget(rank)
        return stopped

    def kill(self, ranks: Iterable[Rank]) -> None:
        """SIGKILL to ranks that must not go on, at once; that they end is no news."""
        for rank in ranks:
            rank.asked_to_stop = True
            if rank.is_alive and rank.pid:
                kill_group(rank.pid)

    def kill_all(self) -> None:
        """SIGKILL to every rank, at once and without a word: what a power cut does."""
        for rank in self.ranks.alive:
            if rank.pid:
                kill_group(rank.pid)

    async def _clear_orphans(self) -> None:
        """End what the ranks that have ended since the last time have left behind: it holds memory, and ports."""
        num_ended = self._num_ended
        if num_ended != self._num_cleared:
            await self._forks.orphans.clear()
            self._num_cleared = num_ended

    def _exited(self, rank: Rank, code: int) -> None:
        self._num_ended += 1
        ending = asyncio.create_task(self._judge_exit(rank, code))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _judge_exit(self, rank: Rank, code: int) -> None:
        await rank.last_words()
        out_of_memory = code in MAY_BE_OUT_OF_MEMORY and self._oom.struck(rank.pid)
        rank.judged = True
        log.info("rank %s ended with code %d in phase %s", rank.key, code, rank.phase)
        if rank.is_command and code == 0 and rank.phase is Phase.RUNNING:
            self._ended_well(rank)
        if rank.is_command and rank.phase is Phase.DRAINED and not rank.asked_to_stop:
            rank.phase, code = Phase.RUNNING, code or TERMINATED  # it has stopped in time, but somebody else had asked it to
        told = rank.phase in {Phase.DRAINED, Phase.FINISHED} or (rank.phase is Phase.FAILED and code in PLAIN)
        if not told:
            job, generation, number = rank.key
            exited = RankExited(
                job=job,
                generation=generation,
                rank=number,
                pid=rank.pid,
                exit_code=code,
                iteration=rank.iteration,
                out_of_memory=out_of_memory,
                error=read_error_file(error_file(self.facts, *rank.key)) or evidence(self.facts, rank),
            )
            self._observe(rank, exited)
        self.on_news(None)
        self.bell.ring()

    def _ended_well(self, rank: Rank) -> None:
        """A command that was asked to stop has stopped, any other one is finished."""
        if rank.asked_to_stop:
            rank.phase = Phase.DRAINED
        else:
            self._vouch(rank)
            self.hear(rank, finished(rank))

    def _observe(self, rank: Rank, body: Body) -> None:
        if rank.asked_to_stop:
            return  # what a rank says or does when it is being stopped is no news
        self._outbox.add(body, at=time.time())
        self.on_news(None)


def bounded(failed: RankFailed) -> RankFailed:
    """As the rank said it, with texts of a length that can be kept and sent."""
    return replace(
        failed,
        error_type=excerpt(failed.error_type, SHORT_LIMIT),
        message=excerpt(failed.message),
        traceback=excerpt(failed.traceback),
        cause=excerpt(failed.cause, SHORT_LIMIT),
        context=excerpt(failed.context, SHORT_LIMIT),
    )


async def end_processes(processes: list[Forked], *, grace_s: float) -> None:
    """SIGTERM, after `grace_s` SIGKILL to the whole groups, also of stopped processes; returns when all are gone."""
    for process in processes:
        if process.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
                os.kill(process.pid, signal.SIGCONT)
    everybody = [asyncio.create_task(process.ended.wait()) for process in processes]
    if not everybody:
        return
    _, obstinate = await asyncio.wait(everybody, timeout=grace_s)
    for process in processes if obstinate else ():
        if process.exit_code is None:
            kill_group(process.pid)
    await asyncio.wait(everybody)


def _needs_peers(command: LaunchRanks) -> bool:
    """A command may do anything anywhere; with tensor or pipeline parallelism all parts of an iteration are common."""
    return bool(command.spec.command) or command.layout.dp < command.layout.num_gpus
