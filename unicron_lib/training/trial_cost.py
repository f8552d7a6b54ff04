"""One figure of a trial beside another one."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

JOB = "bench"
"""What trials keep in stores and slots is of a job of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One figure beside another one; `ratio` is held against `bar`, as a lower or, where `at_most`, an upper bound."""

    what: str
    value: float
    unit: str
    beside: str
    other: float
    ratio: float
    bar: float | None = None
    at_most: bool = False

    @property
    def ok(self) -> bool:
        """Whether the bar, if there is one, is held."""
        return self.bar is None or (self.ratio <= self.bar if self.at_most else self.ratio >= self.bar)


def timed(act: Callable[[], object]) -> float:
    """How many seconds `act` takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def timed_alone(act: Callable[[], object]) -> float:
    """How many seconds `act` takes, less those that this thread was ready and another program had the processor.

    On a machine of one's own that is `timed`. Where the kernel does not tell (`schedstat`), too.
    """
    waited_s = _waited_s()
    elapsed_s = timed(act)
    return elapsed_s - (_waited_s() - waited_s)


def _waited_s() -> float:
    with suppress(OSError):
        told = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
        return int(told.split()[1]) / 1e9
    return 0.0
