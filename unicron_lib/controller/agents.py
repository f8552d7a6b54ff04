"""The websocket endpoint that agents dial."""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from unicron_lib.agent.access import is_admitted
from unicron_lib.agent.messages import AgentHello, FromAgent, FromController, from_agent, from_controller
from unicron_lib.agent.uplink import BAD_TOKEN, DECLARED_LOST, GOING_AWAY, NAME_TAKEN, TOO_MUCH
from unicron_lib.controller.hub import Link, NodeRecord
from unicron_lib.controller.liveness import GOODBYE
from unicron_lib.controller.protocol import RESET
from unicron_lib.controller.service import Controller
from unicron_lib.controller.watch import look_at
from unicron_lib.errors import ControllerError, StoreError

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
PROTOCOL_ERROR, CONTROLLER_STOPS = 1002, 1012
REASON_BYTES = 123
FRAMES_IN_A_ROW = 32
"""Of one agent, before the others have their turn."""
ENDINGS = {
    GOING_AWAY: GOODBYE,
    1000: "its agent gave its connection up",
    1005: "its connection ended without a goodbye",
    RESET: "its connection was reset",
    1009: "its connection was closed over a frame beyond the limit",
    TOO_MUCH: "its connection was closed, for it sent more than it may without an answer",
}
"""How a connection ended, by its close code; 1005 is the end of the stream, 1006 a reset."""


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
    ending: str | None = "its connection broke"
    try:
        ending = await _listen(controller, record, link, socket)
    finally:
        admitting.cancel()
        controller.hub.detach(record, link, now=time.monotonic(), ending=ending)
        look_at(controller, record)
        log.info("node %s is not connected any more: %s", hello.node, ending or "this controller stops")


async def _hello(socket: WebSocket) -> AgentHello | None:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame = await socket.receive()
    except TimeoutError:
        return None
    if frame["type"] == "websocket.disconnect":
        return None
    message = _understood(frame)
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


async def _listen(controller: Controller, record: NodeRecord, link: Link, socket: WebSocket) -> str | None:
    """Take in what comes until the connection ends; how it did, None if no node is to be judged for it."""
    num_unknown = 0
    for number in itertools.count(1):
        frame = await socket.receive()
        if frame["type"] == "websocket.disconnect":
            code = frame.get("code", 1005)
            return None if code == CONTROLLER_STOPS else ENDINGS.get(code, f"its connection was closed with code {code}")
        if link.closed.is_set():
            return None  # a newer connection has taken over
        record.heard_at = time.monotonic()  # whatever it says: it is there
        message = _understood(frame)
        if message is None:
            num_unknown += 1
            _log_unknown(record, frame, num_unknown)
        elif not await controller.hear(record, link, message):
            return ENDINGS[TOO_MUCH]
        if number % FRAMES_IN_A_ROW == 0:
            await asyncio.sleep(0)
    raise AssertionError("unreachable")


def _understood(frame: Mapping[str, Any]) -> FromAgent | None:
    try:
        return from_agent.validate_json(frame.get("text") or "")
    except ValidationError:
        return None


def _log_unknown(record: NodeRecord, frame: Mapping[str, Any], number: int) -> None:
    """The first ones, then ever fewer: a flood must not fill the disk."""
    if number.bit_count() == 1:
        log.warning("node %s said something unknown (%d so far): %.200r", record.hello.node, number, frame.get("text"))


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    """Close with a reason, cut to what a close frame can hold."""
    try:
        await socket.close(code, reason.encode()[:REASON_BYTES].decode(errors="ignore"))
    except (RuntimeError, WebSocketDisconnect, OSError) as error:
        log.info("a connection was gone before it could be closed: %s", error)
