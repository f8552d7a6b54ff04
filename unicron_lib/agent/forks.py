"""The agent's end of the fork server: keeps one warm, spawns processes through it, tells when they end."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unicron_lib.agent.forkserver import kill_group
from unicron_lib.agent.orphans import Orphans
from unicron_lib.errors import AgentError

log = logging.getLogger(__name__)
KILLED = -9


@dataclass(slots=True, kw_only=True, eq=False)
class Forked:
    """A process that the fork server started; `exit_code` is None while it lives."""

    name: str
    on_exit: Callable[[int], None]
    pid: int = 0
    exit_code: int | None = None
    started: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, code: int) -> None:
        """Note the end, once."""
        if self.exit_code is None:
            self.exit_code = code
            self.ended.set()
            self.on_exit(code)


class _Server:
    """One life of a fork server."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, note: Callable[[int], None]) -> None:
        note(process.pid)
        self._note = note
        self.process = process
        self.connection = connection
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.writer: asyncio.StreamWriter | None = None
        self.forked: dict[str, Forked] = {}

    async def run(self) -> None:
        """Take in what it tells until it is dead; its processes are gone, too, on return."""
        reader, self.writer = await asyncio.open_unix_connection(sock=self.connection)
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self.writer.close()
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
            await self._bury()

    def spawn(self, forked: Forked, request: Mapping[str, object]) -> None:
        """Ask for a process, once the server is ready; `forked.started` tells how it went."""
        assert self.writer is not None
        self.forked[forked.name] = forked
        self.writer.write(json.dumps({"id": forked.name, **request}).encode() + b"\n")

    def _take(self, message: Mapping[str, object]) -> None:
        match message["event"]:
            case "ready":
                self.ready.set_result(None)
            case "broken":
                self.ready.set_exception(AgentError(str(message["error"])))
            case "spawned":
                forked = self.forked[str(message["id"])]
                forked.pid = int(str(message["pid"]))
                self._note(forked.pid)
                forked.started.set_result(forked.pid)
            case "refused":
                self.forked.pop(str(message["id"])).started.set_exception(AgentError(str(message["error"])))
            case "exited":
                self.forked.pop(str(message["id"])).end(int(str(message["code"])))

    async def _bury(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(AgentError("the fork server died before it was ready: see its log"))
        self.ready.exception()  # nobody may have waited for it
        for forked in self.forked.values():
            if not forked.pid:
                forked.started.set_exception(AgentError("the fork server died; send the command again"))
                continue
            kill_group(forked.pid)  # they die with their parent, their own children do not
            await until_gone(forked.pid)
            forked.end(KILLED)


class Forks:
    """Starts processes by forking them from a server that has imported `preload` already.

    A server that dies is replaced at once; one whose imports fail is tried again by the next `spawn`. `orphans` marks and
    notes what it starts.
    """

    def __init__(self, *, preload: Sequence[str], log_file: Path, orphans: Orphans) -> None:
        self.orphans = orphans
        self._preload = tuple(preload)
        self._log_file = log_file
        self._server: _Server | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        self._count = 0

    def start(self) -> None:
        """Begin to import; `ready` waits for the end of it."""
        if self._keeper is None or self._keeper.done():
            self._server = self._start_server()
            self._keeper = asyncio.create_task(self._keep(self._server))

    @property
    def pid(self) -> int | None:
        """The process of the server, None before `start`."""
        return self._server.process.pid if self._server else None

    async def ready(self) -> None:
        """Wait until processes can be started at once; raises AgentError with the cause if that cannot be."""
        self.start()
        assert self._server is not None
        await asyncio.shield(self._server.ready)

    async def spawn(self, *, target: str, env: Mapping[str, str], log_file: Path, on_exit: Callable[[int], None]) -> Forked:
        """Start `module:function` as a process with `env` on top of the agent's; raises AgentError.

        `on_exit` is called with the exit code (negative for a signal) the moment the process ends.
        """
        await self.ready()
        assert self._server is not None
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._count += 1
        forked = Forked(name=f"{self._count}", on_exit=on_exit)
        self._server.spawn(forked, {"target": target, "env": dict(env), "log": str(log_file)})
        await forked.started
        return forked

    async def close(self) -> None:
        """End the server and with it every process that it started."""
        self._closing = True
        if self._server and self._keeper:
            self._server.process.terminate()
            with suppress(AgentError):
                await self._keeper

    async def _keep(self, server: _Server) -> None:
        while True:
            await server.run()
            if self._closing:
                return
            if broken := server.ready.exception():
                log.error("no rank can be started: %s; the next launch tries again", broken)
                return
            log.warning("the fork server died with code %s: starting another one", server.process.returncode)
            self._server = server = self._start_server()

    def _start_server(self) -> _Server:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "unicron_lib.agent.forkserver", "--fd", str(theirs.fileno())]
        command += [word for module in self._preload for word in ("--preload", module)]
        # A pool of BLAS threads, which some modules start when imported, would not survive a fork.
        env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | os.environ | self.orphans.environment
        with self._log_file.open("ab") as out, theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,
            )
        return _Server(process, ours, self.orphans.note)


async def until_gone(pid: int) -> None:
    """Wait for the end of a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
