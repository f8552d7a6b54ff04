"""The agent's connection to the controller: dialled for ever, taken up where it broke."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from unicron_lib.agent.commands import Commands
from unicron_lib.agent.messages import (
    Ack,
    AgentHello,
    Command,
    FromAgent,
    Heartbeat,
    InjectFault,
    RankInfo,
    Reply,
    from_agent,
    from_controller,
)
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import Progress
from unicron_lib.agent.supervisor import Supervisor
from unicron_lib.errors import UserError

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
BACK_OFF_S = (0.1, 1.0)
OPEN_TIMEOUT_S = 5.0
GOING_AWAY, BAD_TOKEN, NAME_TAKEN, DECLARED_LOST = 1001, 4401, 4009, 4010
"""Close codes: the agent's goodbye, and the controller's refusals."""


class DeclaredLost(Exception):  # it is news, not an error
    """The cluster has given this life of the agent up while it was out of reach."""


class Uplink:
    """Sends what the supervisor and the outbox hold, hands commands to `commands`; `reached` is set by the first connection."""

    def __init__(self, *, url: str, token: str, supervisor: Supervisor, outbox: Outbox, commands: Commands) -> None:
        self._url = url
        self._token = token
        self._supervisor = supervisor
        self._outbox = outbox
        self._commands = commands
        self._progress: dict[tuple[str, int], Progress] = {}
        self._news = asyncio.Event()
        self.reached = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self.die: Callable[[], None] = supervisor.kill_all
        supervisor.on_news = self._note

    async def run(self) -> None:
        """Stay connected until cancelled; raises UserError for a wrong token or URL, DeclaredLost."""
        back_off_s = BACK_OFF_S[0]
        while True:
            started = time.monotonic()
            try:
                await self._connect_once()
            except (ConnectionClosed, OSError, TimeoutError, InvalidHandshake) as error:
                self._explain(error)
            except InvalidURI:
                raise UserError(f"{self._url} is no websocket address: give it as ws:// or wss://HOST:PORT/v1/agents") from None
            back_off_s = BACK_OFF_S[0] if time.monotonic() - started > HEARTBEAT_S else min(2 * back_off_s, BACK_OFF_S[1])
            await asyncio.sleep(back_off_s * random.uniform(0.5, 1.0))  # noqa: S311  # spreads a fleet, guards nothing

    def _explain(self, error: Exception) -> None:
        code = error.rcvd.code if isinstance(error, ConnectionClosed) and error.rcvd else None
        reason = error.rcvd.reason if isinstance(error, ConnectionClosed) and error.rcvd else str(error)
        if code == BAD_TOKEN or (isinstance(error, InvalidStatus) and error.response.status_code in {401, 403}):
            raise UserError(f"the controller at {self._url} refused the token: use the token file of the controller") from None
        if code == DECLARED_LOST:
            raise DeclaredLost(reason) from None
        log.warning("no connection to the controller at %s: %s; dialling again", self._url, reason or error)

    async def _connect_once(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        async with connect(
            self._url, additional_headers=headers, proxy=None, open_timeout=OPEN_TIMEOUT_S, ping_interval=None, close_timeout=1
        ) as link:
            facts = self._supervisor.facts
            ranks = tuple(rank.info for rank in self._supervisor.ranks.alive)
            hello = AgentHello(
                node=facts.node,
                boot=self._outbox.boot,
                address=facts.address,
                num_gpus=facts.num_gpus,
                rack=facts.rack,
                pool=facts.pool,
                gpu_model=facts.gpu_model,
                ranks=ranks,
            )
            await _send(link, hello)
            log.info("connected to the controller at %s", self._url)
            self.reached.set()
            await self._converse(link)

    async def _converse(self, link: ClientConnection) -> None:
        """Talk until the connection ends, which raises ConnectionClosed, or until cancelled."""
        talks = [asyncio.create_task(talk(link)) for talk in (self._beat, self._push, self._listen)]
        try:
            ended, _ = await asyncio.wait(talks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)
            await link.close(GOING_AWAY, "the agent stops")
        for talk in ended:
            talk.result()

    async def _beat(self, link: ClientConnection) -> None:
        while True:
            await _send(link, self._heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        alive = self._supervisor.ranks.alive
        progress = tuple(rank.progress for rank in alive if rank.progress)
        return Heartbeat(at=time.time(), progress=progress, ranks=tuple(rank.info for rank in alive))

    async def _push(self, link: ClientConnection) -> None:
        """Send at once which ranks there are, their newest progress, and observations: on a new connection all."""
        next_seq = 0
        ranks: tuple[RankInfo, ...] = ()
        while True:
            self._news.clear()
            heartbeat = self._heartbeat()
            if heartbeat.ranks != ranks:
                ranks = heartbeat.ranks
                await _send(link, heartbeat)
            progress, self._progress = self._progress, {}
            for latest in progress.values():
                await _send(link, latest)
            for observation in self._outbox.pending_from(next_seq):
                await _send(link, observation)
                next_seq = observation.seq + 1
            await self._news.wait()

    async def _listen(self, link: ClientConnection) -> None:
        async for frame in link:
            try:
                message = from_controller.validate_json(frame)
            except ValidationError as error:
                log.warning("the controller said something unknown: %s", error)
                continue
            if isinstance(message, Ack):
                self._outbox.acknowledge(message.seqs)
            else:
                self._start_answer(link, message)
        raise link.protocol.close_exc

    def _start_answer(self, link: ClientConnection, command: Command) -> None:
        answering = asyncio.create_task(self._answer(link, command))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def _answer(self, link: ClientConnection, command: Command) -> None:
        doomed = isinstance(command, InjectFault) and command.fault == "node-loss"
        reply = Reply(step=command.step, ok=True) if doomed else await self._commands.answer(command)
        with suppress(ConnectionClosed):  # it will be asked for again, and is remembered
            await _send(link, reply)
        if doomed:
            self.die()

    def _note(self, progress: Progress | None) -> None:
        if progress:
            self._progress[progress.job, progress.rank] = progress
        self._news.set()


async def _send(link: ClientConnection, message: FromAgent) -> None:
    await link.send(from_agent.dump_json(message).decode())
