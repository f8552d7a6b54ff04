"""A script's attempts, and how it parks between them: its process stays, with all that it has in memory, while ranks change."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Lock
from types import TracebackType

from unicron_lib.agent.rank_messages import FromRank, RankFailed, RankOrder, RankParked
from unicron_lib.detection.exceptions import kind_of_exception
from unicron_lib.domain.failures import ECHOES, ErrorKind
from unicron_lib.training.abort import Breaker

OF_TORCH = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
"""Exceptions that only torch.distributed raises."""
OF_BROKEN_CONNECTIONS = ECHOES | {ErrorKind.OTHER, ErrorKind.STORAGE_ERROR, ErrorKind.DATALOADER_ERROR}
"""What a script may complain about while all its connections are being broken."""


class AttemptEnded(BaseException):
    """Leaves an attempt from within `step`, because the agent said so. Not for scripts to catch."""


class Parking:
    """What the agent has ordered of a script that can park, between the thread that listens and the script's own.

    `send` tells the agent something.
    """

    def __init__(self, breaker: Breaker, send: Callable[[FromRank], None]) -> None:
        self._breaker = breaker
        self._send = send
        self._changing = Lock()
        self._next: SimpleQueue[RankOrder] = SimpleQueue()
        self._parked: RankParked | None = None
        self._is_asked = self._is_now = self._is_over = False

    @property
    def is_asked(self) -> bool:
        """Whether the rank is to park after a step that is common to all."""
        return self._is_asked

    @property
    def is_now(self) -> bool:
        """Whether it is to park at once; until it does, whatever it waits for is broken."""
        return self._is_now

    def take(self, order: RankOrder) -> bool:
        """Heed what the agent orders; returns whether the order is about parking."""
        with self._changing:
            match order.order:
                case "park" | "abort" if self._parked is not None:
                    self._send(self._parked)
                case "park":
                    self._is_asked = True
                case "abort" if not self._is_over:
                    self._is_now = True
                    self._breaker.start()
                case "assign" | "quit":
                    self._parked = None
                    self._next.put(order)
                case _:
                    return False
        return True

    def park(self, parked: RankParked, failure: RankFailed | None) -> None:
        """Say that the rank is parked, or the `failure` by which it came to that, unless it was ordered to park.

        From here on nothing is broken any more, and `next_order` tells what comes next.
        """
        with self._changing:
            self._breaker.stop()
            is_ordered = self._is_asked or self._is_now
            self._is_asked = self._is_now = False
            self._parked = parked
            self._send(parked if failure is None or is_ordered else failure)

    def next_order(self, timeout_s: float) -> RankOrder | None:
        """An `assign` or a `quit`, None if none comes in time."""
        try:
            return self._next.get(timeout=timeout_s)
        except Empty:
            return None

    def end(self) -> None:
        """The script has made its last attempt: it breaks and parks no more."""
        with self._changing:
            self._breaker.stop()
            self._is_over = True


class Attempt:
    """One of a script's attempts, a `with` block: what ends it from outside ends nothing else.

    That are errors of collectives, and what the agent orders. All else that is raised in it is the script's own.
    `park` says that the rank is parked, and by which error it came to that, if it was one.
    """

    def __init__(self, parking: Parking, park: Callable[[BaseException | None], None]) -> None:
        self._parking = parking
        self._park = park
        self.is_interrupted = False

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Swallow what ends the attempt only."""
        is_ordered = self._parking.is_now
        if isinstance(error, AttemptEnded) or (error is None and is_ordered):
            self.is_interrupted = True
            self._park(None)
        elif error is not None and is_of_others(error, is_ordered=is_ordered):
            self.is_interrupted = True
            self._park(error)
        return self.is_interrupted


def is_of_others(error: BaseException, *, is_ordered: bool) -> bool:
    """Whether an exception tells of lost peers, and not of this rank; if an abort was ordered, more of them may."""
    kinds = {base.__name__ for base in type(error).__mro__}
    kind = kind_of_exception(type(error).__name__, str(error))
    if is_ordered and isinstance(error, RuntimeError | OSError | EOFError):
        return kind in OF_BROKEN_CONNECTIONS
    return bool(kinds & OF_TORCH) or kind in ECHOES
