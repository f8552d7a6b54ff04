"""The websocket endpoint that agents dial."""

import asyncio
import logging
import time

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from unicron_lib.agent.access import is_admitted
from unicron_lib.agent.messages import AgentHello, FromController, from_agent, from_controller
from unicron_lib.agent.uplink import BAD_TOKEN, DECLARED_LOST, NAME_TAKEN
from unicron_lib.controller.hub import Link, NodeRecord
from unicron_lib.controller.service import Controller
from unicron_lib.controller.watch import look_at
from unicron_lib.errors import ControllerError, StoreError

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
PROTOCOL_ERROR = 1002
REASON_BYTES = 123


async def serve_agent(controller: Controller, token: str, socket: WebSocket) -> None:
    """One connection, from its hello to its end."""
    await socket.accept()
    if not is_admitted(socket.headers.get("authorization"), token):
        await _close(socket, BAD_TOKEN, "wrong token")
        return
    hello = await _hello(socket)
    if hello is None:
        return
    refusal = controller.hub.refusal(hello, now=time.monotonic())
    if refusal:
        await _close(socket, NAME_TAKEN, refusal)
        return
    link = _link(socket)
    record = await controller.arrive(hello, link)
    log.info("node %s is connected from %s", hello.node, hello.address)
    admitting = asyncio.create_task(_admit(controller, record, link))
    try:
        await _listen(controller, record, link, socket)
    finally:
        admitting.cancel()
        controller.hub.detach(record, link)
        look_at(controller, record)
        log.info("the connection of node %s has ended", hello.node)


async def _hello(socket: WebSocket) -> AgentHello | None:
    try:
        message = from_agent.validate_json(await asyncio.wait_for(socket.receive_text(), HELLO_TIMEOUT_S))
    except (TimeoutError, WebSocketDisconnect):
        return None
    except ValidationError:
        message = None
    if isinstance(message, AgentHello):
        return message
    await _close(socket, PROTOCOL_ERROR, "the first frame must be a hello")
    return None


def _link(socket: WebSocket) -> Link:
    async def send(message: FromController) -> None:
        try:
            await socket.send_text(from_controller.dump_json(message).decode())
        except (RuntimeError, WebSocketDisconnect, OSError) as error:
            raise ControllerError("the connection to the node broke: send the command again") from error

    async def close(code: int, reason: str) -> None:
        await _close(socket, code, reason)

    return Link(send=send, close=close)


async def _admit(controller: Controller, record: NodeRecord, link: Link) -> None:
    while True:
        try:
            refusal = await controller.admit(record, link)
        except StoreError as error:
            log.warning("cannot read the journal: %s; trying again", error)
            await asyncio.sleep(1.0)
        else:
            break
    if refusal:
        log.warning("%s; it has to start a new life", refusal)
        await link.close(DECLARED_LOST, refusal)


async def _listen(controller: Controller, record: NodeRecord, link: Link, socket: WebSocket) -> None:
    while True:
        try:
            frame = await socket.receive_text()
        except (WebSocketDisconnect, RuntimeError):
            return
        if link.closed.is_set():
            return  # a newer connection has taken over
        try:
            message = from_agent.validate_json(frame)
        except ValidationError as error:
            log.warning("node %s said something unknown: %s", record.hello.node, error)
            continue
        try:
            await controller.hear(record, link, message)
        except ControllerError:
            return


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    """Close with a reason, cut to what a close frame can hold."""
    try:
        await socket.close(code, reason.encode()[:REASON_BYTES].decode(errors="ignore"))
    except (RuntimeError, WebSocketDisconnect, OSError) as error:
        log.info("a connection was gone before it could be closed: %s", error)
