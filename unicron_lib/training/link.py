"""A rank's connection to its agent: reports go up, orders come down."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Literal

from unicron_lib.agent.rank_messages import FromRank, RankOrder, from_rank, rank_order

log = logging.getLogger(__name__)


class AgentLink:
    """JSON lines over the agent's Unix socket. A rank whose agent is gone has nobody to obey: it exits with 1."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._orders: SimpleQueue[RankOrder] = SimpleQueue()
        self._is_draining = False
        self.injected_text = ""
        self._slowness = 1.0
        self._standing_answer: FromRank | None = None
        self._answering = threading.Lock()
        threading.Thread(target=self._listen, name="agent-link", daemon=True).start()

    def send(self, message: FromRank) -> None:
        """Report to the agent. A lost agent is noticed by the listening thread."""
        try:
            self._socket.sendall(from_rank.dump_json(message) + b"\n")
        except OSError:
            os._exit(1)

    def take_fault(self) -> Literal["raise", "nan"] | None:
        """An injected fault that has been ordered since the last call; ends the process if that was the fault."""
        fault: Literal["raise", "nan"] | None = None
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return fault
            match order.order:
                case "raise" | "nan" as fault:
                    self.injected_text = order.text
                case "slow":
                    self._slowness = max(1.0, order.amount)
                case "exit":
                    os._exit(int(order.amount))
                case _:
                    log.info("training: %s is ignored", order.order)

    @property
    def slowness(self) -> float:
        """How many times as long its own part of an iteration takes a rank that was ordered to be slow; 1 for others."""
        return self._slowness

    @property
    def is_draining(self) -> bool:
        """Whether the agent has asked for a stop at an iteration's end."""
        return self._is_draining

    @contextmanager
    def drains_answered_with(self, answer: FromRank) -> Iterator[None]:
        """While the block runs, which nothing can interrupt, a drain is answered at once and ends the process with 0."""
        with self._answering:
            self._standing_answer = answer
            self._answer_drain()
        try:
            yield
        finally:
            with self._answering:
                self._standing_answer = None

    def next_order(self) -> RankOrder:
        """Wait for an order other than a drain, for ever."""
        return self._orders.get()

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._take(rank_order.validate_json(line))
        except (OSError, ValueError):
            pass
        os._exit(1)

    def _take(self, order: RankOrder) -> None:
        if order.order != "drain":
            self._orders.put(order)
            return
        with self._answering:
            self._is_draining = True
            self._answer_drain()

    def _answer_drain(self) -> None:
        if self._is_draining and self._standing_answer is not None:
            self.send(self._standing_answer)
            os._exit(0)
