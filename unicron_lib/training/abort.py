"""Breaking what a rank waits for: a collective, or a rendezvous, that will never end.

gloo and the rendezvous store have no abort that unblocks a waiting thread, but they all fail within milliseconds when their
connections end. NCCL has one, which is asked too.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

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
    """Shut down all established TCP connections but those to the object store; returns how many.

    A save may be under way there that nobody wants to lose. Listening sockets stay: gloo terminates the process when its own is
    gone.
    """
    spared = store_ports(os.environ)
    broken = 0
    for connection in _connections():
        with connection, suppress(OSError):
            if connection.getpeername()[1] not in spared:
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def store_ports(variables: Mapping[str, str]) -> frozenset[int]:
    """The ports that an S3 server answers on, by the AWS_* variables; 443 and 80 if they name none."""
    named = [urlsplit(variables.get(name, "")) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")]
    return frozenset({443, 80, *(url.port for url in named if url.port)})


def _connections() -> Iterator[socket.socket]:
    """Copies of the process's TCP sockets that do not listen."""
    for entry in Path("/proc/self/fd").iterdir():
        if (copy := _copy(int(entry.name))) is not None:
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
