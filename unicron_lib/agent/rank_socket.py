"""The Unix socket on which ranks talk to their agent, in JSON lines; what is not urgent they leave for it in memory."""

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from pydantic import ValidationError

from unicron_lib.agent.left_lines import LineReader, lines_path
from unicron_lib.agent.lines import next_line
from unicron_lib.agent.rank_messages import FromRank, RankFailed, RankHello, from_rank
from unicron_lib.agent.ranks import Rank, Ranks

log = logging.getLogger(__name__)
LINE_LIMIT_BYTES = 1 << 20
"""Twice as much may be in memory of each rank."""
TURN = 64
"""Lines of one rank after which the others have their turn."""
_ERROR_TYPE = re.compile(r'"error_type"\s*:\s*"([^"\\]{1,200})",?\s*("message"\s*:\s*")?')


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

    def look(self, rank: Rank) -> None:
        """Pass on what the rank has left in memory; an empty line on the socket asks for that, any other one comes after it."""
        if rank.left is None:
            try:
                rank.left = LineReader(lines_path(self._path.parent, *rank.key))
            except FileNotFoundError:
                return
            except OSError as error:
                log.warning("what rank %s has left cannot be read: %s", rank.key, error)
                return
        for line in rank.left.read():
            self._pass_on(rank, line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: Rank | None = None
        try:
            first, _ = await next_line(reader)
            rank = self._greet(first, writer)
            if rank:
                await self._listen(rank, reader)
        except ConnectionError as error:
            log.warning("the connection of %s ended: %s", rank.key if rank else "an unknown process", error)
        finally:
            if rank:
                self.look(rank)
                rank.disconnect()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _listen(self, rank: Rank, reader: asyncio.StreamReader) -> None:
        """Pass on what the rank says until it is gone; of a line that is too long at least which error it tells."""
        for number in count(1):
            line, is_whole = await next_line(reader)
            if not line:
                return
            self.look(rank)
            if is_whole and line.strip():
                self._pass_on(rank, line)
            elif not is_whole:
                self._pass_on_head(rank, line)
            if number % TURN == 0:
                await asyncio.sleep(0)

    def _greet(self, line: bytes, writer: asyncio.StreamWriter) -> Rank | None:
        try:
            hello = from_rank.validate_json(line)
        except ValidationError:
            hello = None
        if not isinstance(hello, RankHello):
            log.warning("a process on the rank socket did not say who it is: %.200r", line)
            return None
        rank = self._ranks.find(hello.job, hello.generation, hello.rank)
        if rank is None or rank.judged or rank.connected.is_set():
            log.warning("refused %s: it is not a rank of this agent, or it is here already", hello)
            return None
        rank.connect(writer)
        return rank

    def _pass_on(self, rank: Rank, line: bytes) -> None:
        try:
            message = from_rank.validate_json(line)
        except ValidationError as error:
            log.warning("rank %s said something unknown: %s", rank.key, error)
            return
        if message.job == rank.job and message.generation < rank.generation:
            return  # it has another place by now, and what it said in the old one is over
        if (message.job, message.generation, message.rank) != rank.key:
            log.warning("rank %s spoke in the name of another one: %.200r", rank.key, line)
            return
        self._tell(rank, message)

    def _pass_on_head(self, rank: Rank, head: bytes) -> None:
        log.warning("rank %s said a line of more than %d bytes", rank.key, LINE_LIMIT_BYTES)
        text = head.decode(errors="replace")
        error = _ERROR_TYPE.search(text)
        if error:
            job, generation, number = rank.key
            failed = RankFailed(
                job=job,
                generation=generation,
                rank=number,
                iteration=rank.iteration,
                error_type=error[1],
                message=text[error.end() :],
                traceback="",
                parked=False,
            )
            self._tell(rank, failed)
