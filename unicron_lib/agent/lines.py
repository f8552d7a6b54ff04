"""Lines from a stream, of any length, at the cost of the stream's limit in memory."""

import asyncio

HEAD_BYTES = 64 << 10
"""What is kept of a line that is longer than the stream's limit."""


async def next_line(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """The next line, empty at the end, and whether it is whole: of a line beyond the stream's limit there is the head only."""
    try:
        return await reader.readuntil(), True
    except asyncio.IncompleteReadError as end:
        return end.partial, True
    except asyncio.LimitOverrunError:
        head = await reader.read(HEAD_BYTES)
        await _skip_line(reader)
        return head, False


async def _skip_line(reader: asyncio.StreamReader) -> None:
    while True:
        try:
            await reader.readuntil()
        except asyncio.LimitOverrunError as found:
            await reader.readexactly(found.consumed)
        except asyncio.IncompleteReadError:
            return
        else:
            return
