"""A TCP proxy between an agent and the controller, to break the network between the two in every way it breaks."""

import asyncio
import socket
import struct
from contextlib import suppress

ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER: a close sends RST."""


class Proxy:
    """Forwards to `port`. `dropped` counts bytes that were swallowed, `refused` dials that were."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._refusing = False
        self._pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.dropped = self.refused = self.num_connections = 0

    async def start(self) -> str:
        """Listen; the URL for the agent."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1/agents"

    def swallow(self) -> None:
        """A black hole: connections stay, also new ones are taken, and no byte arrives."""
        self._flows.clear()

    def reset(self) -> None:
        """RST to both sides, and to whoever dials again."""
        self._refusing = True
        self.cut()

    def cut(self) -> None:
        """RST to both sides; they may dial again."""
        for pair in self._pairs:
            for writer in pair:
                _abort(writer)

    def half_close(self) -> None:
        """The controller sees the end of the stream, the agent sees nothing until it is answered; no further connection."""
        self._refusing = True
        for _, controller in self._pairs:
            controller.write_eof()

    def mend(self) -> None:
        """As if nothing had been."""
        self._refusing = False
        self._flows.set()

    async def close(self) -> None:
        """End everything."""
        self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self.refused += 1
            _abort(writer)
            return
        self.num_connections += 1
        out_reader, out_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._pairs.append((writer, out_writer))
        for source, sink in ((reader, out_writer), (out_reader, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if not self._flows.is_set():
                    self.dropped += len(data)
                    await self._flows.wait()
                sink.write(data)
                await sink.drain()
        with suppress(OSError, RuntimeError):
            sink.close()


def _abort(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket | None = writer.get_extra_info("socket")
    with suppress(OSError):
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    writer.transport.abort()
