"""One figure of a trial beside another one."""

import time
from collections.abc import Callable
from dataclasses import dataclass

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
