"""The agents' connections: who is there, what each said last, commands and their replies."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from unicron_lib.agent.messages import Ack, AgentHello, Command, FromController, RankInfo, Reply
from unicron_lib.controller.liveness import DEFAULT_PATIENCE, Contact
from unicron_lib.errors import CommandTimeout, ControllerError, NodeNotConnected

Send = Callable[[FromController], Awaitable[None]]


@dataclass(slots=True, kw_only=True, eq=False)
class Link:
    """One connection of an agent; commands wait until `joined`, that is until its arrival is journalled."""

    send: Send
    close: Callable[[int, str], Awaitable[None]]
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    replies: dict[str, list[asyncio.Future[Reply]]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class NodeRecord:
    """A node and what is known of it; `link` is its open connection, `ending` how its last one ended. Times are monotonic.

    `settles_at` is when a node that comes and goes may get ranks again, None if it may already.
    """

    hello: AgentHello
    heard_at: float
    ranks: tuple[RankInfo, ...] = ()
    link: Link | None = None
    dialled: bool = False
    ended_at: float | None = None
    ending: str = ""
    suspected: bool = False
    lost: bool = False
    suspicion: int = 0
    settles_at: float | None = None

    @property
    def contact(self) -> Contact:
        """As liveness looks at it."""
        return Contact(heard_at=self.heard_at, ended_at=self.ended_at, ending=self.ending, dialled=self.dialled)


class Hub:
    """All nodes by name."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}

    def refusal(self, hello: AgentHello, *, now: float) -> str | None:
        """Why an agent cannot take its name, None if it can: the name is free, it is its own, or its holder is silent."""
        holder = self.nodes.get(hello.node)
        if holder is None or holder.link is None or holder.hello.boot == hello.boot:
            return None
        if now - holder.heard_at >= DEFAULT_PATIENCE.suspect_after_s:
            return None
        return f"a node named {hello.node} is connected already, from {holder.hello.address}: give each node its own name"

    async def attach(self, hello: AgentHello, link: Link, *, now: float) -> NodeRecord:
        """Take a connection in; an older one of the same node is closed."""
        record = self.nodes.get(hello.node)
        older = record.link if record else None
        if record is None or record.hello.boot != hello.boot:
            record = self.nodes[hello.node] = NodeRecord(hello=hello, heard_at=now)
        record.hello, record.ranks, record.link = hello, hello.ranks, link
        record.heard_at, record.dialled, record.ended_at = now, True, None
        if older:
            older.closed.set()
            await older.close(1008, "replaced by a newer connection of this node")
        return record

    def detach(self, record: NodeRecord, link: Link, *, now: float, ending: str | None) -> None:
        """A connection has ended, and how: None if the node is not to be judged for it. Who waits for an answer is told."""
        link.closed.set()
        link.joined.set()  # whoever waits for that goes on, and finds it closed
        if record.link is link:
            record.link = None
            if ending is not None:
                record.ended_at, record.ending = now, ending
        for waiting in link.replies.values():
            for reply in waiting:
                if not reply.done():
                    reply.set_exception(
                        ControllerError(f"the connection to node {record.hello.node} broke: send the command again")
                    )

    async def command(self, node: str, command: Command, *, timeout_s: float) -> Reply:
        """Have the agent of `node` carry a command out.

        Raises NodeNotConnected, CommandTimeout, or ControllerError when the connection breaks meanwhile. The same
        command may be sent again after each of them.
        """
        record = self.nodes.get(node)
        link = record.link if record else None
        if link is None:
            known = "is not connected" if record else "is unknown"
            raise NodeNotConnected(f"node {node} {known}: see `unicron nodes`")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        link.replies.setdefault(command.step, []).append(answer)
        try:
            async with asyncio.timeout(timeout_s):
                await link.joined.wait()
                await link.send(command)
                return await answer
        except TimeoutError:
            raise CommandTimeout(
                f"node {node} has not answered {command.type} within {timeout_s:g} s: send the same step again"
            ) from None
        finally:
            waiting = link.replies.get(command.step, [])
            if answer in waiting:
                waiting.remove(answer)
            if not waiting:
                link.replies.pop(command.step, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # a broken connection may have been told twice

    def answered(self, link: Link, reply: Reply) -> None:
        """A reply has come: all who asked for that step get it."""
        for waiting in link.replies.pop(reply.step, []):
            if not waiting.done():
                waiting.set_result(reply)

    async def acknowledge(self, node: str, boot: str, seqs: tuple[int, ...]) -> None:
        """Tell an agent, if that life of it is connected, to forget observations; it repeats those on its next connection."""
        record = self.nodes.get(node)
        if record and record.link and record.hello.boot == boot and seqs:
            with suppress(ControllerError):
                await record.link.send(Ack(seqs=seqs))
