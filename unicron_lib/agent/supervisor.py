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
from unicron_lib.agent.environment import NodeFacts, error_file, log_file, rank_environment
from unicron_lib.agent.forks import Forked, Forks
from unicron_lib.agent.forkserver import kill_group
from unicron_lib.agent.messages import Body, LaunchRanks, RankExited
from unicron_lib.agent.oom import OomWatch
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import FromRank, Progress, RankDrained, RankFailed, RankFinished, RankHello, RankOrder
from unicron_lib.agent.ranks import Phase, Rank, Ranks

log = logging.getLogger(__name__)
RANK_TARGET = "unicron_lib.training.rank:main"
TEXT_LIMIT = 32 << 10
"""Characters of a message or traceback that are passed on; the rank's log has all of it."""


class Supervisor:
    """The ranks of a node from launch to end.

    `bell` rings at each change of a rank. `on_news` is called when there is something new for the controller: a
    rank's progress, or None for an observation in the outbox or a rank that came or went.
    """

    def __init__(self, *, facts: NodeFacts, forks: Forks, outbox: Outbox, socket: Path, target: str = RANK_TARGET) -> None:
        self.facts = facts
        self.ranks = Ranks()
        self.bell = Bell()
        self.on_news: Callable[[Progress | None], None] = lambda _: None
        self._forks = forks
        self._outbox = outbox
        self._socket = socket
        self._target = target
        self._oom = OomWatch()
        self._endings: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        """Wait until ranks can be started at once; raises AgentError with the cause if they cannot."""
        await self._forks.ready()

    async def launch(self, command: LaunchRanks, rank: int, gpu: int) -> Rank:
        """Start a rank, or return the one that was started before; raises AgentError."""
        known = self.ranks.find(command.job, command.generation, rank)
        if known:
            return known
        new = Rank(job=command.job, generation=command.generation, rank=rank, gpu=gpu)
        self.ranks.add(new)
        where = (self.facts, new.job, new.generation)
        error_file(*where, rank).parent.mkdir(parents=True, exist_ok=True)
        try:
            new.process = await self._forks.spawn(
                target=self._target,
                env=rank_environment(self.facts, command, rank, self._socket),
                log_file=log_file(*where, f"r{rank}"),
                on_exit=partial(self._exited, new),
            )
        except BaseException:
            self.ranks.forget(new)
            raise
        log.info("started rank %s with pid %d", new.key, new.pid)
        self.on_news(None)
        return new

    def hear(self, rank: Rank, message: FromRank) -> None:
        """Take in what a rank said."""
        match message:
            case RankHello():
                pass
            case Progress():
                rank.iteration, rank.progress = message.iteration, message
                self.on_news(message)
            case RankFailed():
                rank.phase = Phase.PARKED if message.parked else Phase.FAILED
                rank.iteration = message.iteration
                shortened = replace(message, message=shorten(message.message), traceback=shorten(message.traceback))
                self._observe(rank, shortened)
            case RankDrained():
                rank.phase = rank.phase if rank.phase is Phase.PARKED else Phase.DRAINED
                rank.iteration, rank.manifest = message.iteration, message.manifest
            case RankFinished():
                rank.phase, rank.iteration = Phase.FINISHED, message.iteration
                self._observe(rank, message)
        self.bell.ring()

    async def stop(self, ranks: Iterable[Rank], *, grace_s: float) -> int:
        """End ranks, the obstinate ones with SIGKILL after `grace_s`; the number that had to be ended."""
        living = [rank for rank in ranks if rank.is_alive]
        for rank in living:
            rank.asked_to_stop = True
            if rank.phase is Phase.PARKED:
                rank.order(RankOrder(order="quit"))
        await end_processes([rank.process for rank in living if rank.process], grace_s=grace_s)
        return len(living)

    def kill_all(self) -> None:
        """SIGKILL to every rank, at once and without a word: what a power cut does."""
        for rank in self.ranks.alive:
            if rank.pid:
                kill_group(rank.pid)

    def _exited(self, rank: Rank, code: int) -> None:
        ending = asyncio.create_task(self._judge_exit(rank, code))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _judge_exit(self, rank: Rank, code: int) -> None:
        out_of_memory = code == -signal.SIGKILL and self._oom.struck()
        await rank.last_words()
        rank.judged = True
        log.info("rank %s ended with code %d in phase %s", rank.key, code, rank.phase)
        told = rank.phase in {Phase.DRAINED, Phase.FINISHED} or (rank.phase is Phase.FAILED and code >= 0)
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
            )
            self._observe(rank, exited)
        self.on_news(None)
        self.bell.ring()

    def _observe(self, rank: Rank, body: Body) -> None:
        if rank.asked_to_stop:
            return  # what a rank says or does when it is being stopped is no news
        self._outbox.add(body, at=time.time())
        self.on_news(None)


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


def shorten(text: str) -> str:
    """Head and tail of a long text."""
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]}\n [... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
