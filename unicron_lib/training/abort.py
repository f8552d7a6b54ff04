"""Breaking what a rank waits for: a collective, or a rendezvous, that will never end.

gloo and the rendezvous store have no abort that unblocks a waiting thread, but they all fail within milliseconds when their
connections end. NCCL has one, which is asked too.
"""

import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)
EVERY_S = 0.05
"""The thread that waits may open new connections until it sees that it is to park."""


class Breaker:
    """Breaks all connections of torch in this process, again and again, from `start` until `stop`.

    `abort_groups` is called once at first, for what is no socket.
    """

    def __init__(self, abort_groups: Callable[[], None] = lambda: None) -> None:
        self._abort_groups = abort_groups
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; twice is fine."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="breaker", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Break nothing any more once this returns; fine if it was not started."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        self._abort_groups()
        while True:
            break_connections()
            if self._stopping.wait(EVERY_S):
                return


def break_connections() -> int:
    """Shut down all established TCP connections that are not Python's own; returns how many.

    Those of torch are C++'s. Python's belong to the object store, where a save may be under way that nobody wants to lose.
    Listening sockets stay: gloo terminates the process when its own is gone.
    """
    spared = {own.fileno() for own in gc.get_objects() if issubclass(type(own), socket.socket)}
    broken = 0
    for connection in _connections(spared):
        with connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            broken += 1
    return broken


def _connections(spared: set[int]) -> Iterator[socket.socket]:
    """Copies of the process's TCP sockets that do not listen."""
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        if descriptor not in spared and (copy := _copy(descriptor)) is not None:
            is_tcp = copy.family in {socket.AF_INET, socket.AF_INET6} and copy.type == socket.SOCK_STREAM
            if is_tcp and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield copy
            else:
                copy.close()


def _copy(descriptor: int) -> socket.socket | None:
    try:
        descriptor = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    try:
        return socket.socket(fileno=descriptor)
    except OSError:  # a file
        os.close(descriptor)
        return None
