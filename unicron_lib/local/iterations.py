"""When iterations are done, as anybody can see it: by the lines that ranks append to their ledgers, whoever runs them."""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

LOOK_S = 0.005
"""How exact the times are."""
FILE = re.compile(r"g(\d+)-r(\d+)\.jsonl")
ITERATION = re.compile(rb'^\{"iteration":(\d+),')


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A rank has done an iteration (0-based); `at` is by the monotonic clock, at most `LOOK_S` too late."""

    at: float
    generation: int
    rank: int
    iteration: int


class IterationWatch:
    """Looks at the ledgers in `directory` from a thread of its own, from `__enter__` to `__exit__`."""

    def __init__(self, directory: Path, *, look_s: float = LOOK_S) -> None:
        self._directory = directory
        self._look_s = look_s
        self._read: dict[str, int] = {}
        self._sights: list[Sight] = []
        self._changed = threading.Condition()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="iteration-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    @property
    def sights(self) -> Sequence[Sight]:
        """All that was seen so far, in the order of time."""
        with self._changed:
            return tuple(self._sights)

    def until(self, holds: Callable[[Sequence[Sight]], bool], *, timeout_s: float) -> bool:
        """Wait until `holds` of what was seen; False if it does not within `timeout_s`, or the watch has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends.is_set() or holds(self._sights), timeout=timeout_s)
            return holds(self._sights)

    def _watch(self) -> None:
        while not self._ends.wait(self._look_s):
            found = self._look()
            if found:
                with self._changed:
                    self._sights += found
                    self._changed.notify_all()

    def _look(self) -> list[Sight]:
        try:
            entries = list(os.scandir(self._directory))
        except FileNotFoundError:
            return []
        return [sight for entry in entries if (match := FILE.fullmatch(entry.name)) for sight in self._news(entry, match)]

    def _news(self, entry: os.DirEntry[str], match: re.Match[str]) -> list[Sight]:
        """What was appended; a line that is not complete yet is read later."""
        read = self._read.get(entry.name, 0)
        if entry.stat().st_size <= read:
            return []
        at = time.monotonic()
        with Path(entry.path).open("rb") as ledger:
            ledger.seek(read)
            whole, _, _ = ledger.read().rpartition(b"\n")
        if not whole:
            return []
        self._read[entry.name] = read + len(whole) + 1
        found = (ITERATION.match(line) for line in whole.split(b"\n"))
        generation, rank = int(match[1]), int(match[2])
        return [Sight(at=at, generation=generation, rank=rank, iteration=int(it[1])) for it in found if it]
