"""The Unix socket on which ranks talk to their agent, in JSON lines."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from unicron_lib.agent.rank_messages import FromRank, RankHello, from_rank
from unicron_lib.agent.ranks import Rank, Ranks

log = logging.getLogger(__name__)
LINE_LIMIT_BYTES = 8 << 20


class RankSocket:
    """Accepts ranks of `ranks` and passes on what each one tells."""

    def __init__(self, *, path: Path, ranks: Ranks, tell: Callable[[Rank, FromRank], None]) -> None:
        self._path = path
        self._ranks = ranks
        self._tell = tell
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; only this user's processes can reach the socket, for the directory is private."""
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=LINE_LIMIT_BYTES)

    async def close(self) -> None:
        """Listen no more."""
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: Rank | None = None
        try:
            rank = self._greet(await reader.readline(), writer)
            while rank and (line := await reader.readline()):
                self._pass_on(rank, line)
        except (ConnectionError, ValueError) as error:  # ValueError: a line beyond the limit
            log.warning("the connection of %s ended: %s", rank.key if rank else "an unknown process", error)
        finally:
            if rank:
                rank.disconnect()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def _greet(self, line: bytes, writer: asyncio.StreamWriter) -> Rank | None:
        try:
            hello = from_rank.validate_json(line)
        except ValidationError:
            hello = None
        if not isinstance(hello, RankHello):
            log.warning("a process on the rank socket did not say who it is: %.200r", line)
            return None
        rank = self._ranks.find(hello.job, hello.generation, hello.rank)
        if rank is None or rank.judged:
            log.warning("refused %s: it is not a rank of this agent", hello)
            return None
        rank.connect(writer)
        return rank

    def _pass_on(self, rank: Rank, line: bytes) -> None:
        try:
            message = from_rank.validate_json(line)
        except ValidationError as error:
            log.warning("rank %s said something unknown: %s", rank.key, error)
            return
        if (message.job, message.generation, message.rank) != rank.key:
            log.warning("rank %s spoke in the name of another one: %.200r", rank.key, line)
            return
        self._tell(rank, message)
