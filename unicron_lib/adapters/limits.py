"""Calls that end in time, whatever a server does: one that answers a byte a minute keeps its thread, not its caller."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from unicron_lib.errors import StoreError

MAX_LEFT_BEHIND = 128
"""So many threads may hang in requests that were given up, until no new ones are begun."""

T = TypeVar("T")
_left_behind: set[threading.Thread] = set()


class Limit:
    """The moment at which `what` must have ended; `over` wakes whoever pauses between two attempts of it."""

    def __init__(self, limit_s: float, what: str) -> None:
        self._ends_at = time.monotonic() + limit_s
        self._told = f"{what} took longer than {limit_s:g} s and was given up"
        self.over = threading.Event()

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 when it is over."""
        return 0.0 if self.over.is_set() else max(0.0, self._ends_at - time.monotonic())

    def error(self) -> StoreError:
        """What to raise when nothing is left."""
        return StoreError(self._told)

    def pause(self, pause_s: float) -> None:
        """Sleep; raises StoreError when that would be too long."""
        if pause_s >= self.left_s or self.over.wait(pause_s):
            raise self.error()


def in_time(limit: Limit, call: Callable[[], T]) -> T:
    """What `call` returns or raises; StoreError at the limit, when it is left behind."""
    (result,) = in_parallel(limit, [call], num_threads=1)
    return result


def in_parallel(limit: Limit, calls: Iterable[Callable[[], T]], *, num_threads: int) -> Iterable[T]:
    """What the calls return, as they do; the first error of one, or StoreError at the limit, ends it for all.

    The threads are daemons: a process that ends does not wait for a server either.
    """
    waiting = queue.SimpleQueue[Callable[[], T]]()
    num_calls = 0
    for num_calls, call in enumerate(calls, 1):  # noqa: B007 - the count is what we are after
        waiting.put(call)
    results = queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]]()
    _refuse_if_too_many_hang()
    threads = [
        threading.Thread(target=_work, args=(limit, waiting, results), name="store", daemon=True)
        for _ in range(min(num_threads, num_calls))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(num_calls):
            yield _next(limit, results)
    except BaseException:  # also when the caller does not want the rest
        limit.over.set()
        _left_behind.update(thread for thread in threads if thread.is_alive())
        raise


def _next(limit: Limit, results: "queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]]") -> T:
    try:
        result, error = results.get(timeout=limit.left_s)
    except queue.Empty:
        raise limit.error() from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # mypy does not follow pairs


def _work(
    limit: Limit,
    waiting: "queue.SimpleQueue[Callable[[], T]]",
    results: "queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]]",
) -> None:
    while not limit.over.is_set():
        try:
            call = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            results.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            results.put((None, error))
            return


def _refuse_if_too_many_hang() -> None:
    _left_behind.difference_update([thread for thread in _left_behind if not thread.is_alive()])
    if len(_left_behind) >= MAX_LEFT_BEHIND:
        raise StoreError(f"{len(_left_behind)} requests hang that were given up: the store does not answer")
