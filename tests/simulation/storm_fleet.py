"""Many storms, in several processes at once."""

import multiprocessing
import os
import signal
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import storm

LONGEST_S = 300
"""Of a storm, however busy the machine is: one that waits for itself would never end."""


@dataclass(frozen=True)
class Season:
    """What storms in a row did and saw, together."""

    number: int
    harm: Counter[str]
    seen: Counter[str]
    left_behind: tuple[str, ...]


def play_all(first: int, number: int) -> Season:
    """In a process of its own. Raises StormBroken with the story of the first one that goes wrong, or does not end."""
    harm, seen, left = Counter[str](), Counter[str](), []
    signal.signal(signal.SIGALRM, _give_up)
    for seed in range(first, first + number):
        signal.alarm(LONGEST_S)
        weather = storm.play(seed)
        harm += weather.harm
        seen += weather.seen
        left += weather.left_behind
    signal.alarm(0)
    return Season(number=number, harm=harm, seen=seen, left_behind=tuple(left))


def _give_up(*_: object) -> None:
    raise TimeoutError(f"it has not ended within {LONGEST_S} s")


class Fleet:
    """Plays storms in as many processes as there are processors, by `chunk`, from the first; each is asked for by itself."""

    def __init__(self, first: int, end: int, chunk: int) -> None:
        spawn = multiprocessing.get_context("spawn")  # the parent may have threads
        self._pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=spawn)
        starts = range(first, end, chunk)
        self._seasons: dict[int, Future[Season]] = {start: self._pool.submit(play_all, start, chunk) for start in starts}

    def season(self, first: int) -> Season:
        """What the storms from `first` did; waits for them, raises StormBroken."""
        return self._seasons[first].result()

    def close(self) -> None:
        """What is not played yet is not going to be."""
        self._pool.shutdown(wait=True, cancel_futures=True)
