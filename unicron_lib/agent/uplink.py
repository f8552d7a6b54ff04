"""The agent's connection to the controller: dialled for ever, taken up where it broke."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from unicron_lib.agent.commands import Commands
from unicron_lib.agent.fault_messages import InjectFault
from unicron_lib.agent.messages import (
    Ack,
    AgentHello,
    Command,
    FromAgent,
    Heartbeat,
    RankInfo,
    Reply,
    from_agent,
    from_controller,
)
from unicron_lib.agent.outbox import Outbox
from unicron_lib.agent.rank_messages import Progress
from unicron_lib.agent.supervisor import Supervisor
from unicron_lib.agent.window import Window
from unicron_lib.errors import UserError

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
BACK_OFF_S = (0.1, 1.0)
OPEN_TIMEOUT_S = 5.0
DEAF_S = 10.0
"""A controller that has not even echoed a ping for so long is gone, whatever the connection says."""
GOING_AWAY, TOO_MUCH, BAD_TOKEN, NAME_TAKEN, DECLARED_LOST = 1001, 1008, 4401, 4009, 4010
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
        self._all_told = False
        self._dark_until = -math.inf
        self._link: ClientConnection | None = None
        self._told = ""
        self.reached = asyncio.Event()
        self.memory_port = 0
        self._answering: set[asyncio.Task[None]] = set()
        self.die: Callable[[], None] = supervisor.kill_all
        supervisor.on_news = self._note

    @property
    def is_open(self) -> bool:
        """Whether there is a controller, as far as the connection tells."""
        return self._link is not None

    @property
    def is_quiet(self) -> bool:
        """Whether everything there was to tell is told, and no command is being carried out."""
        return self._all_told and not self._answering

    async def run(self) -> None:
        """Stay connected until cancelled; raises UserError for a wrong token or URL, DeclaredLost."""
        back_off_s = BACK_OFF_S[0]
        while True:
            await self._light()
            started = time.monotonic()
            try:
                await self._connect_once()
            except (ConnectionClosed, OSError, TimeoutError, InvalidHandshake) as error:
                self._explain(error)
            except InvalidURI:
                raise UserError(f"{self._url} is no websocket address: give it as ws:// or wss://HOST:PORT/v1/agents") from None
            back_off_s = BACK_OFF_S[0] if time.monotonic() - started > HEARTBEAT_S else min(2 * back_off_s, BACK_OFF_S[1])
            await asyncio.sleep(back_off_s * random.uniform(0.5, 1.0))  # noqa: S311  # spreads a fleet, guards nothing

    def black_out(self, seconds: float) -> None:
        """Neither read nor write, nor dial, for so long, with the connection left open: what a partition looks like."""
        self._dark_until = time.monotonic() + seconds
        if self._link:
            self._link.transport.pause_reading()
            asyncio.get_running_loop().call_later(seconds, self._link.transport.resume_reading)

    async def _light(self) -> None:
        """Wait until a black-out is over."""
        if (left_s := self._dark_until - time.monotonic()) > 0:
            await asyncio.sleep(left_s)

    def _explain(self, error: Exception) -> None:
        close = error.rcvd if isinstance(error, ConnectionClosed) else None
        if close and close.code == DECLARED_LOST:
            raise DeclaredLost(close.reason) from None
        refused = isinstance(error, InvalidStatus) and error.response.status_code in {401, 403}
        if refused or (close and close.code == BAD_TOKEN):
            raise UserError(f"the controller at {self._url} refused the token: use the token file of the controller") from None
        told = _cause(error)
        if told != self._told:
            log.warning("no connection to the controller at %s: %s; dialling until there is one", self._url, told)
        self._told = told

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
                memory_port=self.memory_port,
                address=facts.address,
                num_gpus=facts.num_gpus,
                rack=facts.rack,
                pool=facts.pool,
                gpu_model=facts.gpu_model,
                ranks=ranks,
            )
            await self._send(link, hello)
            log.info("connected to the controller at %s", self._url)
            self._told, self._link = "", link
            self.reached.set()
            try:
                await self._converse(link)
            finally:
                self._link, self._all_told = None, False

    async def _converse(self, link: ClientConnection) -> None:
        """Talk until the connection ends, which raises ConnectionClosed or TimeoutError, or until cancelled."""
        window = Window(self._outbox)
        talks = [self._beat(link), self._check(link), self._push(link, window), self._listen(link, window)]
        tasks = [asyncio.create_task(talk) for talk in talks]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _end(tasks)
            await link.close(GOING_AWAY, "the agent stops")
            raise
        await _end(tasks)
        for task in ended:
            task.result()

    async def _beat(self, link: ClientConnection) -> None:
        while True:
            await self._send(link, self._heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    async def _check(self, link: ClientConnection) -> None:
        """Raise TimeoutError when the controller is gone although nobody has closed the connection."""
        while True:
            await self._light()
            try:
                async with asyncio.timeout(DEAF_S):
                    await (await link.ping())
            except TimeoutError:
                if self._dark_until < time.monotonic() - DEAF_S:
                    raise TimeoutError(f"it has not answered for {DEAF_S:.0f} s") from None
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self) -> Heartbeat:
        alive = self._supervisor.ranks.alive
        progress = tuple(rank.progress for rank in alive if rank.progress)
        return Heartbeat(at=time.time(), progress=progress, ranks=tuple(rank.info for rank in alive))

    async def _push(self, link: ClientConnection, window: Window) -> None:
        """Send at once which ranks there are, their newest progress, and observations: on a new connection all."""
        ranks: tuple[RankInfo, ...] = ()
        while True:
            self._news.clear()
            heartbeat = self._heartbeat()
            if heartbeat.ranks != ranks:
                ranks = heartbeat.ranks
                await self._send(link, heartbeat)
            progress, self._progress = self._progress, {}
            for latest in progress.values():
                await self._send(link, latest)
            for observation in window.take():
                await self._send(link, observation)
            self._all_told = not self._news.is_set()
            await self._news.wait()

    async def _listen(self, link: ClientConnection, window: Window) -> None:
        async for frame in link:
            await self._light()
            try:
                message = from_controller.validate_json(frame)
            except ValidationError as error:
                log.warning("the controller said something unknown: %s", error)
                continue
            if isinstance(message, Ack):
                window.acknowledge(message.seqs)
                self._news.set()
            else:
                self._start_answer(link, message)
        raise link.protocol.close_exc

    def _start_answer(self, link: ClientConnection, command: Command) -> None:
        answering = asyncio.create_task(self._answer(link, command))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def _answer(self, link: ClientConnection, command: Command) -> None:
        fault = command.fault if isinstance(command, InjectFault) else None
        reply = Reply(step=command.step, ok=True) if fault == "node-loss" else await self._commands.answer(command)
        with suppress(ConnectionClosed):  # it will be asked for again, and is remembered
            await self._send(link, reply)
        if fault == "node-loss":
            self.die()
        if isinstance(command, InjectFault) and fault == "partition":
            self.black_out(command.amount)

    def _note(self, progress: Progress | None) -> None:
        if progress:
            self._progress[progress.job, progress.rank] = progress
        self._all_told = False
        self._news.set()

    async def _send(self, link: ClientConnection, message: FromAgent) -> None:
        await self._light()
        await link.send(from_agent.dump_json(message).decode())


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _cause(error: Exception) -> str:
    """Why there is no connection, in words that tell one cause from another."""
    match error:
        case ConnectionClosed():
            close = error.rcvd
            return f"it was closed with {close.code} {close.reason}".rstrip() if close else "it ended without a goodbye"
        case ConnectionRefusedError():
            return "it is refused, nothing listens there"
        case TimeoutError():
            return str(error) or f"no answer within {OPEN_TIMEOUT_S:.0f} s"
    return str(error) or type(error).__name__
