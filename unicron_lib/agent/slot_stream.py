"""A state's bytes from a file into a connection, and out of one into a file: by the kernel, past this process's memory.

A page that is mapped for the first time costs a fault, and that costs several times as much as copying into it does.
"""

import fcntl
import os
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import BinaryIO

from unicron_lib.checkpointing.slot_digest import Digest
from unicron_lib.errors import SlotError

SENT_BYTES = 4 << 20
PIPE_BYTES = 1 << 20
STEP_BYTES = 4 << 20
"""What is read for the digest at a time."""
Limit = Callable[[], float]
"""How many seconds the other side may be silent now; raises SlotError once all should be there."""


def send(connection: socket.socket, file: BinaryIO, *, begin: int, num_bytes: int, limit: Limit) -> None:
    """Send so many bytes of a file; raises SlotError, OSError.

    They are sent out of the file's own pages: it must not change before the other side has said that it has them.
    """
    for at in range(0, num_bytes, SENT_BYTES):
        wanted = min(SENT_BYTES, num_bytes - at)
        connection.settimeout(limit())
        try:
            sent = connection.sendfile(file, begin + at, wanted)
        except TimeoutError as error:
            raise SlotError(f"the other side took no more than {at} of {num_bytes} bytes") from error
        if sent < wanted:
            raise SlotError(f"the slot ended after {at + sent} of {num_bytes} bytes")


def receive(connection: socket.socket, descriptor: int, *, begin: int, num_bytes: int, limit: Limit) -> str:
    """Fill a file with so many bytes; returns their digest. Raises SlotError, OSError.

    What has come is read for the digest by another thread, while the next is under way.
    """
    digest, there, told = _FileDigest(descriptor, begin), 0, 0
    with _pipe() as pipe, ThreadPoolExecutor(1, thread_name_prefix="digest") as behind:
        steps = []
        while there < num_bytes:
            _wait(connection, limit(), f"after {there} of {num_bytes} bytes")
            moved = _move(connection, pipe, descriptor, begin + there, num_bytes - there)
            if not moved:
                raise SlotError(f"the connection ended after {there} of {num_bytes} bytes")
            there += moved
            if there - told >= STEP_BYTES or there == num_bytes:
                steps.append(behind.submit(digest.advance, begin + there))
                told = there
        for step in steps:
            step.result()
    return digest.hexdigest()


def _wait(connection: socket.socket, limit_s: float, where: str) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(1000 * limit_s):
        raise SlotError(f"the other side fell silent {where}")


def _move(connection: socket.socket, pipe: tuple[int, int], descriptor: int, at: int, most: int) -> int:
    """Put what has come to `at` of the file; returns how many bytes that was, 0 at the end."""
    out, into = pipe
    moved = left = os.splice(connection.fileno(), into, min(most, PIPE_BYTES))
    while left:
        left -= os.splice(out, descriptor, left, offset_dst=at + moved - left)
    return moved


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """What is read from, and what is written to."""
    out, into = os.pipe()
    try:
        with suppress(OSError):  # who has many pipes is not given large ones
            fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        yield out, into
    finally:
        os.close(out)
        os.close(into)


class _FileDigest(Digest):
    """Of a file from `at` on, as far as it is there."""

    def __init__(self, descriptor: int, at: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._at = at
        self._piece = memoryview(bytearray(STEP_BYTES))

    def advance(self, end: int) -> None:
        """All before `end` is there."""
        while self._at < end:
            read = os.preadv(self._descriptor, [self._piece[: end - self._at]], self._at)
            if not read:
                raise SlotError("the slot was cut while a state came")
            self.update(self._piece[:read])
            self._at += read
