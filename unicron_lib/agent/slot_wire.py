"""States from node to node: a few signed words and the bytes, over TCP.

Both sides prove that they have the agents' token, which itself does not travel; each word is signed for this connection. The
bytes are compared with the digest in a signed word once they are there. They are not encrypted, as ranks' traffic is not.
"""

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, BinaryIO, Literal

from pydantic import Discriminator, TypeAdapter, ValidationError

from unicron_lib.agent import slot_stream
from unicron_lib.agent.slot_house import SlotHouse
from unicron_lib.checkpointing.slot_header import HEADER_BYTES, PART, SlotHeader
from unicron_lib.checkpointing.slots import SlotPair
from unicron_lib.domain.jobs import NAME
from unicron_lib.errors import SlotError

log = logging.getLogger(__name__)
NONCE, MAC = 32, 32
LONGEST_WORD = 1 << 16
PATIENCE_S = 10.0
"""For a connection, and for each word."""
SLOWEST_BYTES_S = 20e6
MOST_AT_ONCE = 4
NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """The client has a state; its bytes follow if the answer wants them."""

    header: SlotHeader
    word: Literal["put"] = "put"


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """The client wants a state, or a part of it; its bytes follow the answer."""

    job: str
    generation: int
    iteration: int
    part: str = ""
    word: Literal["get"] = "get"

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.job) or not PART.fullmatch(self.part):
            raise ValueError("that is no job's name, or no part's")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`refusal` is empty if all is well. To a Put, `wanted` asks for the bytes; to a Get, `header` tells of them."""

    refusal: str = ""
    wanted: bool = False
    header: SlotHeader | None = None


_request: TypeAdapter[Put | Get] = TypeAdapter(Annotated[Put | Get, Discriminator("word")])
_answer: TypeAdapter[Answer] = TypeAdapter(Answer)


class Channel:
    """One connection between two that have the same token. What fails raises SlotError or OSError."""

    def __init__(self, connection: socket.socket, token: str, *, is_server: bool) -> None:
        self._socket = connection
        self._key = token.encode()
        self._said = {True: 0, False: 0}
        self._is_server = is_server
        self._session = b""
        connection.settimeout(PATIENCE_S)
        mine = secrets.token_bytes(NONCE)
        connection.sendall(mine)
        theirs = self._exactly(NONCE)
        self._session = mine + theirs if is_server else theirs + mine

    def say(self, word: bytes) -> None:
        """Send a signed word."""
        self._socket.settimeout(PATIENCE_S)
        self._socket.sendall(len(word).to_bytes(4, "big") + self._signature(word, by_server=self._is_server) + word)

    def hear(self) -> bytes:
        """The other's next word."""
        self._socket.settimeout(PATIENCE_S)
        length = int.from_bytes(self._exactly(4), "big")
        if length > LONGEST_WORD:
            raise SlotError("the other side speaks another language: it sends a word that is too long")
        signature, word = self._exactly(MAC), self._exactly(length)
        if not hmac.compare_digest(signature, self._signature(word, by_server=not self._is_server)):
            raise SlotError("the other side has another token")
        return word

    def send_state(self, file: BinaryIO, num_bytes: int) -> None:
        """Send the state in a slot's file, which must stay as it is until the other side has said that all is there."""
        slot_stream.send(self._socket, file, begin=HEADER_BYTES, num_bytes=num_bytes, limit=_limit(num_bytes))

    def receive_state(self, descriptor: int, num_bytes: int) -> str:
        """Fill a slot's file with the state that comes; returns its digest."""
        return slot_stream.receive(self._socket, descriptor, begin=HEADER_BYTES, num_bytes=num_bytes, limit=_limit(num_bytes))

    def _signature(self, word: bytes, *, by_server: bool) -> bytes:
        self._said[by_server] += 1
        number = self._said[by_server].to_bytes(4, "big")
        return hmac.digest(self._key, (b"s" if by_server else b"c") + self._session + number + word, "sha256")

    def _exactly(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            piece = self._socket.recv(size - len(received))
            if not piece:
                raise SlotError("the other side hung up")
            received += piece
        return received


def deadline_s(num_bytes: int) -> float:
    """How long a state of that size may travel."""
    return PATIENCE_S + num_bytes / SLOWEST_BYTES_S


def _limit(num_bytes: int) -> slot_stream.Limit:
    deadline = time.monotonic() + deadline_s(num_bytes)

    def left_s() -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SlotError("the copy was not there by its deadline")
        return min(PATIENCE_S, left)

    return left_s


def offer(peer: str, token: str, pair: SlotPair, header: SlotHeader) -> bool:
    """Give a slot to the node at `peer`, `HOST:PORT`; whether it lacked it. Raises SlotError, OSError."""
    with pair.reading_file(header.place) as (told, file), _dial(peer) as connection:
        channel = Channel(connection, token, is_server=False)
        channel.say(_request.dump_json(Put(header=told)))
        answer = _heard(channel)
        if answer.wanted:
            channel.send_state(file, told.num_bytes)
            _heard(channel)
        return answer.wanted


def fetch(peer: str, token: str, pair: SlotPair, wanted: Get) -> SlotHeader:
    """Get a slot from the node at `peer` into one of `pair`. Raises SlotError, OSError."""
    with _dial(peer) as connection:
        channel = Channel(connection, token, is_server=False)
        channel.say(_request.dump_json(wanted))
        header = _heard(channel).header
        asked_for = (wanted.job, wanted.part, wanted.generation, wanted.iteration)
        if header is None or (header.job, header.part, *header.place) != asked_for:
            raise SlotError("the peer has sent another state")
        _take(channel, pair, header)
        with suppress(OSError):  # an earlier version has hung up
            channel.say(_answer.dump_json(Answer()))
        return header


def _heard(channel: Channel) -> Answer:
    try:
        answer = _answer.validate_json(channel.hear())
    except ValidationError as error:
        raise SlotError("the other side speaks another language") from error
    if answer.refusal:
        raise SlotError(answer.refusal)
    return answer


def _take(channel: Channel, pair: SlotPair, header: SlotHeader, *, announce: Callable[[], None] = lambda: None) -> None:
    with pair.receiving(header.num_bytes) as claim:
        announce()
        if channel.receive_state(claim.descriptor, header.num_bytes) != header.digest:
            raise SlotError("the copy is damaged: it has another digest than its header says")
        claim.commit(header)


def _dial(peer: str) -> socket.socket:
    host, _, port = peer.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


class SlotServer:
    """Takes and gives slots; `refusal` tells why a state is not taken, "" if it is. Its threads end when it is closed."""

    def __init__(self, *, house: SlotHouse, token: str, refusal: Callable[[SlotHeader], str]) -> None:
        self._house = house
        self._token = token
        self._refusal = refusal
        self._listener: socket.socket | None = None
        self._free = threading.Semaphore(MOST_AT_ONCE)
        self.port = 0

    def start(self, address: str) -> None:
        """Listen; where that cannot be, `port` stays 0 and no peer is asked for anything."""
        try:
            self._listener = socket.create_server((address, 0))
        except OSError as error:
            log.warning("no states are exchanged with other nodes: cannot listen on %s: %s", address, error)
            return
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), name="slots", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="slot", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._answer(Channel(connection, self._token, is_server=True))
        except (SlotError, OSError, ValidationError) as error:
            log.info("a state was not exchanged: %s", error)
        finally:
            self._free.release()

    def _answer(self, channel: Channel) -> None:
        request = _request.validate_json(channel.hear())
        try:
            if isinstance(request, Put):
                be_nice()  # a copy may wait; who gets a state is a training that stands still
                self._store(channel, request.header)
            else:
                self._give(channel, request)
        except SlotError as error:
            channel.say(_answer.dump_json(Answer(refusal=str(error))))

    def _store(self, channel: Channel, header: SlotHeader) -> None:
        pair = self._house.pair(header.job, header.part)
        known = next(iter(pair.found()), None)
        if reason := self._refusal(header):
            raise SlotError(reason)
        if known is not None and known.place > header.place:
            raise SlotError(f"iteration {known.iteration} of generation {known.generation} is there already")
        if known is None or known.place < header.place:
            _take(channel, pair, header, announce=lambda: channel.say(_answer.dump_json(Answer(wanted=True))))
        channel.say(_answer.dump_json(Answer()))
        self._house.touch(header.job)

    def _give(self, channel: Channel, wanted: Get) -> None:
        slots, place = self._house.all_of(wanted.job, wanted.part), (wanted.generation, wanted.iteration)
        with slots.reading_file(place) as (header, file):
            channel.say(_answer.dump_json(Answer(header=header)))
            channel.send_state(file, header.num_bytes)
            channel.hear()  # until all is there, the slot stays locked


def be_nice() -> None:
    """What the calling thread does may wait for the training."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
