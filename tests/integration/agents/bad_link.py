"""A bad link of one node: TCP proxies in front of what its processes talk to, for the rendezvous and for gloo's data.

Processes of a gloo group tell each other in the rendezvous store where they listen, as a `sockaddr_in`, and of a pair the one
with the smaller address listens. The node's process reaches the store through a proxy, which writes other addresses, of the
same length, into what passes: those of others become larger than its own, so that it listens; its own becomes that of a second
proxy, smaller than those of the others, so that they dial it. So every byte between it and anybody else passes the proxies.
"""

import asyncio
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 1 << 18
HERE, ELSEWHERE = socket.inet_aton("127.0.0.1"), socket.inet_aton("127.0.0.2")
LISTENS = re.compile(rb"\x02\x00(..)" + re.escape(HERE) + bytes(8), re.DOTALL)
"""A `sockaddr_in` of the loopback device on a little-endian machine; the port is in the network's order."""
SMALL_PORTS = range(0x0500, 0x8000, 0x0100)
"""gloo compares ports as little-endian numbers: these are smaller than any that the kernel gives."""
PAUSE_S = 0.01
"""What belongs to one message of the store comes without a pause as long as this."""
Pass = Callable[[bytearray], Awaitable[None]]


class BadLink:
    """What passes for a node; `harm` may change and delay a chunk of data on its way. `num_bytes` of data have passed."""

    def __init__(self, harm: Pass) -> None:
        self._harm = harm
        self._servers: list[asyncio.Server] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.num_bytes = self.num_connections = 0

    async def to_store(self, port: int) -> int:
        """The port on which a store at `port` is to be had behind the link."""

        async def dialled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            store_reader, store_writer = await asyncio.open_connection("127.0.0.1", port)
            self._pump(self._say(reader, store_writer))
            self._pump(self._hear(store_reader, writer))

        return await self._serve(dialled, (0,))

    async def close(self) -> None:
        """End everything."""
        for server in self._servers:
            server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _to_process(self, port: int) -> int:
        """The port on which others reach what the node's process listens to."""

        async def dialled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            own_reader, own_writer = await asyncio.open_connection("127.0.0.1", port)
            self._pump(self._carry(reader, own_writer))
            self._pump(self._carry(own_reader, writer))

        return await self._serve(dialled, SMALL_PORTS)

    async def _serve(self, dialled: Callable[..., Awaitable[None]], ports: range | tuple[int, ...]) -> int:
        for port in ports:
            with suppress(OSError):
                server = await asyncio.start_server(dialled, "127.0.0.1", port, limit=CHUNK_BYTES)
                self._servers.append(server)
                return int(server.sockets[0].getsockname()[1])
        raise AssertionError("no port is free")

    def _pump(self, work: Awaitable[None]) -> None:
        pump = asyncio.ensure_future(work)
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _say(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """What the node's process tells the store: for each place where it listens, a proxy."""
        with _closing(sink):
            while said := await _message(source):
                for at, port in _places(said):
                    struct.pack_into(">H", said, at, await self._to_process(port))
                sink.write(said)
                await sink.drain()

    async def _hear(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """What it is told: everybody is at an address that is larger than its own."""
        with _closing(sink):
            while told := await _message(source):
                for at, _ in _places(told):
                    told[at + 2 : at + 6] = ELSEWHERE
                sink.write(told)
                await sink.drain()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with _closing(sink):
            while chunk := bytearray(await source.read(CHUNK_BYTES)):
                self.num_bytes += len(chunk)
                await self._harm(chunk)
                sink.write(chunk)
                await sink.drain()


@contextmanager
def _closing(sink: asyncio.StreamWriter) -> Iterator[None]:
    """Close the writer at the end; a connection that breaks is no matter."""
    try:
        with suppress(OSError):
            yield
    finally:
        with suppress(OSError, RuntimeError):
            sink.close()


def slowed(bytes_per_s: float) -> Pass:
    """Each direction carries no more than that."""

    async def harm(chunk: bytearray) -> None:
        await asyncio.sleep(len(chunk) / bytes_per_s)

    return harm


def flipping(every_bytes: int) -> Pass:
    """About one bit in so many bytes is another one, in large chunks only: what is short may be a header of gloo's."""
    passed = 0

    async def harm(chunk: bytearray) -> None:
        nonlocal passed
        passed += len(chunk)
        if passed >= every_bytes and len(chunk) > CHUNK_BYTES // 4:
            chunk[len(chunk) // 2] ^= 1 << passed % 8
            passed = 0

    return harm


async def _message(source: asyncio.StreamReader) -> bytearray:
    """All that comes without a pause, so that no address is cut in two."""
    found = bytearray(await source.read(CHUNK_BYTES))
    with suppress(TimeoutError):
        while found:
            async with asyncio.timeout(PAUSE_S):
                more = await source.read(CHUNK_BYTES)
            if not more:
                break
            found += more
    return found


def _places(said: bytearray) -> list[tuple[int, int]]:
    """Where the ports of addresses are in it, and what they are."""
    return [(found.start(1), struct.unpack(">H", found[1])[0]) for found in LISTENS.finditer(bytes(said))]
