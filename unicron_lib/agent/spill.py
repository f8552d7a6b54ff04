"""A queue of lines in a file, for what must not be lost and is too much for memory."""

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

log = logging.getLogger(__name__)
COMPACT_BYTES = 4 << 20
"""Of what was read already that the file may hold, as long as more waits in it than was read."""
MOST_UNWRITTEN = 5000
"""Lines in memory while the file cannot be written: of those that may be dropped, the ones beyond are."""


class Spill:
    """First in, first out. A file that cannot be written keeps the rest in memory: losing it would be worse.

    The file serves one life of one process, so it is not synced; it is empty at the start and whenever all is read.
    `lost` is told how many lines are gone for good: the file was damaged, or neither disk nor memory had room.
    """

    def __init__(self, path: Path, *, lost: Callable[[int], None]) -> None:
        self._path = path
        self._lost = lost
        self._begin = self._end = self._count = 0
        self._unwritten: deque[bytes] = deque()

    def __len__(self) -> int:
        """Lines that wait."""
        return self._count + len(self._unwritten)

    def put(self, line: bytes, *, may_drop: bool = False) -> None:
        """Add a line without its end; one that `may_drop` is lost if there is no room."""
        if not self._unwritten and self._write(line + b"\n"):
            return
        if may_drop and len(self._unwritten) >= MOST_UNWRITTEN:
            self._lost(1)
        else:
            self._unwritten.append(line)

    def take(self, limit: int) -> list[bytes]:
        """Remove the oldest lines, at most `limit`; fewer, maybe none, where the file is damaged."""
        lines = self._read(min(limit, self._count))
        while self._unwritten and not self._count and len(lines) < limit:
            lines.append(self._unwritten.popleft())
        if not len(self):
            self.clear()
        return lines

    def clear(self) -> None:
        """Forget everything."""
        self._unwritten.clear()
        self._empty_file()

    def _empty_file(self) -> None:
        self._begin = self._end = self._count = 0
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:  # it is written from its beginning, whatever is in it
            log.warning("cannot remove %s: %s", self._path, error.strerror)

    def _write(self, line: bytes) -> bool:
        """Write at the end of the last whole line, over what a failed attempt may have left there."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                written = os.pwrite(descriptor, line, self._end)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("cannot write %s: %s; observations are kept in memory", self._path, error.strerror)
            return False
        if written < len(line):
            return False
        self._end += len(line)
        self._count += 1
        return True

    def _read(self, limit: int) -> list[bytes]:
        if not limit:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._begin)
                lines = [file.readline() for _ in range(limit)]
        except OSError as error:
            self._give_up(f"cannot be read: {error.strerror}")
            return []
        whole = list(takewhile(lambda line: line.endswith(b"\n"), lines))
        self._begin += sum(map(len, whole))
        self._count -= len(whole)
        if len(whole) < limit:
            self._give_up("has been cut")
        self._compact()
        return [line[:-1] for line in whole]

    def _give_up(self, what: str) -> None:
        """Nothing in the file can be trusted any more; what comes later is written to a new one."""
        log.error("%s %s: the %d observations in it are lost", self._path, what, self._count)
        self._lost(self._count)
        self._empty_file()

    def _compact(self) -> None:
        """Drop what was read from the file: it is as long as all that was ever written since it was empty."""
        if self._begin < max(COMPACT_BYTES, self._end - self._begin):
            return
        shorter = self._path.with_name(f"{self._path.name}.new")
        try:
            with self._path.open("rb") as old, shorter.open("wb") as new:
                old.seek(self._begin)
                shutil.copyfileobj(old, new)
            shorter.replace(self._path)
        except OSError as error:
            log.warning("cannot shorten %s: %s; trying again later", self._path, error.strerror)
            return
        self._begin, self._end = 0, self._end - self._begin
