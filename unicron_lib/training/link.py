"""A rank's connection to its agent: reports go up, orders come down."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Literal, assert_never

from unicron_lib.agent.rank_messages import FromRank, RankOrder, RankParked, from_rank, rank_order
from unicron_lib.training.abort import Breaker
from unicron_lib.training.life import Act, State, act_on

log = logging.getLogger(__name__)
Fault = Literal["raise", "nan", "spike", "corrupt"]
"""What the training loop does to itself when it is ordered to."""


class AgentLink:
    """JSON lines over the agent's Unix socket. A rank whose agent is gone has nobody to obey: it exits with 1.

    What an order means depends on the rank's state, see `life`. A thread listens; the main thread says where it is, and looks
    for what was ordered whenever it can: `is_draining` and `is_parking` at an iteration's end, `wants_park` at any moment.
    """

    def __init__(self, path: str, breaker: Breaker | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._breaker = breaker or Breaker()
        self._orders: SimpleQueue[RankOrder] = SimpleQueue()
        self._state = State.STARTING
        self._is_draining = self._is_parking = self._is_saving = False
        self._parks_now = threading.Event()
        self._parked: FromRank | None = None
        self.injected_text = ""
        self._slowness = 1.0
        self._spiked = 0
        self._standing_answer: FromRank | None = None
        self._changing = threading.RLock()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="agent-link", daemon=True).start()

    def send(self, message: FromRank) -> None:
        """Report to the agent. A lost agent is noticed by the listening thread."""
        self.send_line(from_rank.dump_json(message) + b"\n")

    def send_line(self, line: bytes) -> None:
        """Report what is in the form of a message already."""
        try:
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            os._exit(1)

    def take_fault(self) -> Fault | None:
        """An injected fault that has been ordered since the last call; ends the process if that was the fault."""
        fault: Fault | None = None
        while not self._orders.empty():  # nobody else takes any
            order = self._orders.get_nowait()
            match order.order:
                case "raise" | "nan" | "corrupt" as fault:
                    self.injected_text = order.text
                case "spike":
                    self._spiked = int(order.amount)
                case "slow":
                    self._slowness = max(1.0, order.amount)
                case "exit":
                    os._exit(int(order.amount))
                case _:
                    log.info("training: %s is ignored", order.order)
        return fault or self._spike()

    def _spike(self) -> Literal["spike"] | None:
        """For as many iterations as were ordered."""
        if not self._spiked:
            return None
        self._spiked -= 1
        return "spike"

    def take_save(self) -> bool:
        """Whether a checkpoint has been ordered since the last call."""
        with self._changing:
            ordered, self._is_saving = self._is_saving, False
        return ordered

    @property
    def slowness(self) -> float:
        """How many times as long its own part of an iteration takes a rank that was ordered to be slow; 1 for others."""
        return self._slowness

    @property
    def is_draining(self) -> bool:
        """Whether the agent has asked for a stop at an iteration's end, with a checkpoint."""
        return self._is_draining

    @property
    def is_parking(self) -> bool:
        """Whether the agent has asked for a stop at an iteration's end, with the state in memory. A drain outdoes it."""
        return self._is_parking and not self._is_draining

    @property
    def wants_park(self) -> bool:
        """Whether the rank is to park at once. Until it does, whatever it waits for is broken."""
        return self._parks_now.is_set()

    def rest(self, duration_s: float) -> None:
        """Sleep, but not when the rank is to park."""
        self._parks_now.wait(max(0.0, duration_s))

    # --- where the main thread is -------------------------------------------------------------------------------------

    def enter(self, state: State) -> None:
        """The main thread is in another state now. A drain under way stays one until the rank parks."""
        with self._changing:
            self._state = State.DRAINING if state is State.TRAINING and self._is_draining else state

    def park(self, parked: RankParked, failure: FromRank | None = None) -> bool:
        """Say that the rank is parked, or the `failure` by which it came to that, unless it was ordered to park.

        From here on nothing is broken any more, and `next_order` tells what comes next. Returns whether it was ordered.
        """
        with self._changing:
            self._breaker.stop()
            is_ordered = self.wants_park or self._is_parking
            self._state, self._parked = State.PARKED, parked
            self._is_draining = self._is_parking = False
            self._parks_now.clear()
            self.send(parked if failure is None or is_ordered else failure)
        return is_ordered

    def finish(self, message: FromRank) -> None:
        """Say the rank's last word: no order means anything from here on."""
        with self._changing:
            self._state = State.DONE
            self.send(message)

    def next_order(self) -> RankOrder:
        """Wait for what a parked rank is to do, for ever. After an `assign` it is in the state `reconfiguring`."""
        return self._orders.get()

    @contextmanager
    def drains_answered_with(self, answer: FromRank) -> Iterator[None]:
        """While the block runs, a drain is answered at once and ends the process with 0: nothing in it is worth saving."""
        with self._changing:
            self._standing_answer = answer
            self._answer_drain()
        try:
            yield
        finally:
            with self._changing:
                self._standing_answer = None

    # --- the listening thread -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    with self._changing:
                        self._take(rank_order.validate_json(line))
        except (OSError, ValueError):
            pass
        os._exit(1)

    def _take(self, order: RankOrder) -> None:
        act = act_on(order.order, self._state)
        match act:
            case Act.DRAIN:
                self._drain()
            case Act.PARK_AT_END:
                self._is_parking = True
            case Act.PARK_NOW:
                self._park_now()
            case Act.SAVE_AT_END:
                self._is_saving = True
            case Act.SAY_AGAIN:
                assert self._parked is not None
                self.send(self._parked)
            case Act.HAND_ON:
                self._state = State.RECONFIGURING if order.order == "assign" else self._state
                self._orders.put(order)
            case Act.REFUSE:
                log.info("%s: %s is ignored", self._state, order.order)
            case _:
                assert_never(act)

    def _park_now(self) -> None:
        self._parks_now.set()
        self._breaker.start()

    def _drain(self) -> None:
        self._is_draining = True
        self._state = State.DRAINING if self._state is State.TRAINING else self._state
        self._answer_drain()
        if self._state is State.RECONFIGURING:
            self._park_now()

    def _answer_drain(self) -> None:
        if self._is_draining and self._standing_answer is not None:
            self.send(self._standing_answer)
            os._exit(0)
