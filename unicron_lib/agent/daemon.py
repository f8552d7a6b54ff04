"""The life of an agent: wires its parts, leaves nothing behind."""

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from unicron_lib.agent.checks import NodeChecks
from unicron_lib.agent.commands import Commands
from unicron_lib.agent.environment import NodeFacts
from unicron_lib.agent.fencing import Fence
from unicron_lib.agent.forks import Forks
from unicron_lib.agent.gpu_sight import GpuSight
from unicron_lib.agent.injection import Injection
from unicron_lib.agent.kernel_log import KERNEL_LOG, KernelLog
from unicron_lib.agent.leave_messages import NodeLeaving
from unicron_lib.agent.leaving import Leaving
from unicron_lib.agent.memory import NodeMemory
from unicron_lib.agent.messages import GpuFault, NodeNotice, RankResumed, RankStalled
from unicron_lib.agent.oom import OomWatch
from unicron_lib.agent.orphans import Orphans
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.pace_watch import PaceWatch, beat_directory
from unicron_lib.agent.probe import GpuProbe
from unicron_lib.agent.rank_socket import RankSocket
from unicron_lib.agent.rendezvous import RENDEZVOUS_TARGET, RendezvousStores
from unicron_lib.agent.spot_watch import SpotWatch
from unicron_lib.agent.supervisor import RANK_TARGET, Supervisor
from unicron_lib.agent.uplink import DeclaredLost, Uplink
from unicron_lib.detection.xid import XidRules
from unicron_lib.errors import AgentError

log = logging.getLogger(__name__)
STOP_GRACE_S = 3.0
LEAVE_S = 75.0
"""With the time that ranks have to end, below systemd's TimeoutStopSec (90 s)."""
LONGEST_DIRECTORY = 100
"""Bytes; a Unix socket's path has 107 at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """How an agent runs. The targets are `module:function`; `preload` is what the fork server imports ahead.

    `notices_from` is the metadata service that tells of the instance's end; asked to leave, its ranks have `leave_s`.
    """

    facts: NodeFacts
    controller: str
    token: str = field(repr=False)
    rank_target: str = RANK_TARGET
    rendezvous_target: str = RENDEZVOUS_TARGET
    preload: Sequence[str] = ("unicron_lib.training.rank",)
    kernel_log: Path | None = KERNEL_LOG
    xid_rules: XidRules = field(default_factory=XidRules)
    notices_from: str | None = None
    leave_s: float = LEAVE_S


class Agent:
    """One agent process."""

    def __init__(self, options: AgentOptions, directory: Path) -> None:
        facts = options.facts
        socket = directory / "s"
        self._outbox = Outbox(node=facts.node, boot=uuid.uuid4().hex, overflow=directory / "outbox")
        self._orphans = Orphans(facts)
        fork_log = facts.run_dir / "logs" / f"forkserver-{facts.node}.log"
        self._forks = Forks(preload=options.preload, log_file=fork_log, orphans=self._orphans)
        self._oom = OomWatch()
        self._supervisor = Supervisor(
            facts=facts, forks=self._forks, outbox=self._outbox, oom=self._oom, socket=socket, target=options.rank_target
        )
        self._stores = RendezvousStores(facts=facts, forks=self._forks, directory=directory, target=options.rendezvous_target)
        self._socket = RankSocket(path=socket, ranks=self._supervisor.ranks, tell=self._supervisor.hear)
        self._kernel = self._kernel_log(options)
        self._gpus = self._gpu_probe(facts)
        self._pace = PaceWatch(
            ranks=self._supervisor.ranks,
            directory=directory,
            tell=self._tell,
            hear=self._socket.look,
            is_gpu_idle=self._gpus.is_idle,
        )
        self._leaving, self._spot = self._ends_foreseen(options)
        self._leave_s = options.leave_s
        self._fence = Fence()
        self._memory = NodeMemory(facts=facts, token=options.token, ranks=self._supervisor.ranks, fence=self._fence)
        self._uplink = Uplink(
            url=options.controller,
            token=options.token,
            supervisor=self._supervisor,
            outbox=self._outbox,
            commands=self._commands(directory),
        )
        self._uplink.die = self._die

    def _gpu_probe(self, facts: NodeFacts) -> GpuProbe:
        return GpuProbe(
            num_gpus=facts.num_gpus,
            has_gpus=facts.has_gpus,
            life=lambda: self._outbox.boot,
            jobs=self._jobs_here,
            tell=self._tell,
            sight=GpuSight(on_xid=self._kernel.on_xid),
        )

    def _kernel_log(self, options: AgentOptions) -> KernelLog:
        return KernelLog(
            source=options.kernel_log,
            num_gpus=options.facts.num_gpus,
            jobs=self._jobs_here,
            life=lambda: self._outbox.boot,
            tell=self._tell,
            oom=self._oom.name,
            rules=options.xid_rules,
        )

    def _ends_foreseen(self, options: AgentOptions) -> tuple[Leaving, SpotWatch]:
        supervisor, life = self._supervisor, lambda: self._outbox.boot
        leaving = Leaving(ranks=supervisor.ranks, bell=supervisor.bell, life=life, jobs=self._jobs_here, tell=self._tell)
        return leaving, SpotWatch(endpoint=options.notices_from, leaving=leaving, life=life, tell=self._tell)

    def _commands(self, directory: Path) -> Commands:
        return Commands(
            supervisor=self._supervisor,
            stores=self._stores,
            checks=NodeChecks(facts=self._supervisor.facts, forks=self._forks, directory=directory),
            injection=self._injection(),
            memory=self._memory,
            fence=self._fence,
        )

    def _injection(self) -> Injection:
        facts = self._supervisor.facts
        return Injection(
            node=facts.node,
            num_gpus=facts.num_gpus,
            ranks=self._supervisor.ranks,
            gpus=self._gpus,
            kernel=self._kernel,
            notices=self._spot,
        )

    @property
    def _looks(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        return self._gpus.run, self._kernel.run, self._pace.run, self._oom.run, self._memory.run, self._spot.run

    async def run(self, stop: asyncio.Event, leave: asyncio.Event) -> None:
        """Work until `stop` is set, or `leave` and the ranks are let go; raises UserError for a wrong token.

        No process is left on return.
        """
        await self._socket.start()
        self._uplink.memory_port = self._memory.start()
        self._forks.start()
        connected = asyncio.create_task(self._stay_connected())
        ends = [asyncio.create_task(stop.wait()), asyncio.create_task(self._leave(leave))]
        watchers = [asyncio.create_task(self._watch(look)) for look in self._looks]
        try:
            await asyncio.wait([connected, *ends], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._clear()
            for task in (connected, *ends, *watchers):
                task.cancel()  # this says goodbye to the controller
            await asyncio.wait([connected, *ends, *watchers])
            await self._forks.close()
            self._orphans.close()
            self._memory.close()
            await self._socket.close()
        if not connected.cancelled():
            connected.result()

    async def _leave(self, asked: asyncio.Event) -> None:
        await asked.wait()
        await self._leaving.until_released(self._uplink, limit_s=self._leave_s)

    async def _stay_connected(self) -> None:
        """Join when ranks can be started at once: a job that moves here must not wait for imports."""
        with suppress(AgentError):  # it is logged, and each launch answers with the cause
            await self._supervisor.ready()
        while True:
            try:
                await self._uplink.run()
            except DeclaredLost as news:
                log.warning("this node was declared lost (%s): it ends its ranks and starts a new life", news)
                await self._clear()
                self._outbox.start_over(uuid.uuid4().hex)

    async def _watch(self, look: Callable[[], Awaitable[None]]) -> None:
        """From the first connection on: an agent that cannot work has nothing else to say than why."""
        await self._uplink.reached.wait()
        await look()

    async def _clear(self) -> None:
        await self._supervisor.stop(self._supervisor.ranks.alive, grace_s=STOP_GRACE_S)
        await self._stores.close(lambda *_: True, grace_s=STOP_GRACE_S)

    def _jobs_here(self) -> tuple[str, ...]:
        return tuple(sorted({rank.job for rank in self._supervisor.ranks.alive}))

    def _tell(self, news: GpuFault | NodeNotice | NodeLeaving | RankStalled | RankResumed) -> None:
        self._outbox.add(news, at=time.time())
        self._supervisor.on_news(None)

    def _die(self) -> NoReturn:
        """What a power cut does: nobody gets to say goodbye, and what was in memory is gone."""
        self._supervisor.kill_all()
        self._memory.wipe()
        if self._forks.pid:
            os.kill(self._forks.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


async def run_agent(options: AgentOptions) -> None:
    """Run an agent until SIGINT, or SIGTERM and its ranks are let go; raises UserError if it cannot work."""
    directory = _private_directory(options.facts)
    stop, leave = asyncio.Event(), asyncio.Event()

    def on_sigterm() -> None:
        """The second one is meant as SIGINT is."""
        (stop if leave.is_set() else leave).set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        with beat_directory(directory):
            await Agent(options, directory).run(stop, leave)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _private_directory(facts: NodeFacts) -> Path:
    """Where the rank socket lives: below the run directory, unless that makes its path too long for a socket."""
    directory = facts.run_dir / "agents" / f"{facts.node}-{os.getpid()}"
    if len(os.fsencode(directory)) > LONGEST_DIRECTORY:
        return Path(tempfile.mkdtemp(prefix="unicron-", dir="/tmp"))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
