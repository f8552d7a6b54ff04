"""A script's connection to its agent. Unlike our own trainer's it is never needed: without it the script just goes on."""

import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Self

from unicron_lib.agent.rank_messages import FromRank, RankOrder, from_rank, rank_order
from unicron_lib.training.parking import Parking

log = logging.getLogger(__name__)


class SessionLink:
    """JSON lines over the agent's Unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._faults: deque[RankOrder] = deque()
        self._slowness = 1.0
        self._sending = threading.Lock()
        self.is_draining = False
        """Whether the agent has asked for a stop."""
        self.parking: Parking | None = None
        """Of a script that can park: who heeds what is ordered about it."""
        threading.Thread(target=self._listen, name="unicron-session", daemon=True).start()

    @classmethod
    def connect(cls, path: str) -> Self | None:
        """The connection; None if there is no agent any more."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError as error:
            log.warning("nobody hears how this rank is: %s", error)
            connection.close()
            return None
        return cls(connection)

    def send(self, message: FromRank) -> None:
        """Tell the agent, if it still listens."""
        self.send_line(from_rank.dump_json(message) + b"\n")

    def send_line(self, line: bytes) -> None:
        """Tell what is in the form of a message already."""
        with suppress(OSError), self._sending:
            self._socket.sendall(line)

    def suffer(self, duration_s: float) -> None:
        """Do what faults that were injected ask for, after a step of `duration_s`; raises what one of them names."""
        while self._faults:
            order = self._faults.popleft()
            match order.order:
                case "raise":
                    raise _injected(order.text or "InjectedError: injected into a script")
                case "slow":
                    self._slowness = max(1.0, order.amount)
                case "exit":
                    os._exit(int(order.amount))
                case _:
                    log.warning("a script cannot be asked for %s: it is ignored", order.order)
        if self._slowness > 1.0:
            time.sleep((self._slowness - 1.0) * duration_s)

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._take(rank_order.validate_json(line))
        if self.parking is not None:
            self.parking.take(RankOrder(order="quit"))  # who waits for an agent that is gone would wait for ever

    def _take(self, order: RankOrder) -> None:
        if order.order == "drain":
            self.is_draining = True
        elif self.parking is None or not self.parking.take(order):
            self._faults.append(order)


def _injected(text: str) -> Exception:
    """An exception as an order wants it: `text` is its type's name and its message, `TYPE: message`."""
    name, _, message = text.partition(": ")
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(message)
