"""One life of the probe process, from the agent's side: start it, ask it, kill it."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

from pydantic import Discriminator, TypeAdapter

from unicron_lib.agent.probe_messages import Closed, FromProbe, Look, Opened, Started, XidSeen

COMMAND = (sys.executable, "-m", "unicron_lib.agent.probe_process")
HANGING = (*COMMAND, "hang")
"""One that never answers, for drills."""
START_S = 60.0
"""For Python itself to start on a busy node, which is not the driver's doing."""

GOODBYE_S = 1.0
LONGEST_LINE = 1 << 20
"""Bytes; a look at 16 GPUs takes less than 20 000."""

from_probe: TypeAdapter[FromProbe] = TypeAdapter(Annotated[FromProbe, Discriminator("type")])
"""Reads one line of its standard output."""


class ProbeLife:
    """A probe process that was started; `on_xid` gets index, UUID and number of each Xid, at once."""

    def __init__(self, *, on_xid: Callable[[int, str, int], None], command: Sequence[str] = COMMAND) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        self._on_xid = on_xid
        self._answers: asyncio.Queue[FromProbe | None] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._reading = asyncio.create_task(self._read(ours))
        self._opened: Opened | None = None

    @property
    def opened(self) -> Opened | None:
        """What the driver said when it was opened, None until then."""
        return self._opened

    @property
    def is_gone(self) -> bool:
        """The process has ended; one that is stuck in the driver does not, even when it is killed."""
        return self._process.poll() is not None

    async def look(self, *, deadline_s: float) -> Look | Closed | None:
        """Look at the GPUs; None if the process ended without a word. Raises TimeoutError if the driver does not answer."""
        if self._opened is None:
            async with asyncio.timeout(START_S):
                started = await self._answers.get()
            async with asyncio.timeout(deadline_s):
                opened = await self._answers.get() if isinstance(started, Started) else None
            if not isinstance(opened, Opened):
                return opened if isinstance(opened, Closed) else None
            self._opened = opened
        assert self._writer is not None
        self._writer.write(b"\n")
        async with asyncio.timeout(deadline_s):
            answer = await self._answers.get()
        return answer if isinstance(answer, Look | Closed) else None

    def kill(self) -> None:
        """End it as hard as can be; whether that works is told by `is_gone`."""
        self._process.kill()

    async def bury(self) -> None:
        """Kill it and clean up. It is not waited for if it does not end."""
        self.kill()
        await asyncio.wait([self._reading], timeout=GOODBYE_S)
        self._reading.cancel()
        await asyncio.wait([self._reading])
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)

    async def _read(self, connection: socket.socket) -> None:
        """Take in what it says until it ends; what is not a word of ours is its end, too."""
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
        try:
            while line := await reader.readline():
                message = from_probe.validate_json(line)
                if isinstance(message, XidSeen):
                    self._on_xid(message.gpu, message.uuid, message.xid)
                else:
                    self._answers.put_nowait(message)
        except (ConnectionError, ValueError):
            pass
        finally:
            self._answers.put_nowait(None)
            self._writer.close()
