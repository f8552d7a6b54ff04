"""A queue of lines in a file, for what must not be lost and is too much for memory."""

import logging
import os
from collections import deque
from pathlib import Path

log = logging.getLogger(__name__)


class Spill:
    """First in, first out. A file that cannot be written keeps the rest in memory: losing it would be worse.

    The file serves one life of one process, so it is not synced; it is empty at the start and whenever all is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin = self._end = self._count = 0
        self._unwritten: deque[bytes] = deque()

    def __len__(self) -> int:
        """Lines that wait."""
        return self._count + len(self._unwritten)

    def put(self, line: bytes) -> None:
        """Add a line without its end."""
        if self._unwritten or not self._write(line + b"\n"):
            self._unwritten.append(line)

    def take(self, limit: int) -> list[bytes]:
        """Remove the oldest lines, at most `limit`."""
        lines = self._read(min(limit, self._count))
        while self._unwritten and len(lines) < limit:
            lines.append(self._unwritten.popleft())
        if not len(self):
            self.clear()
        return lines

    def clear(self) -> None:
        """Forget everything."""
        self._begin = self._end = self._count = 0
        self._unwritten.clear()
        self._path.unlink(missing_ok=True)

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
        with self._path.open("rb") as file:
            file.seek(self._begin)
            lines = [file.readline() for _ in range(limit)]
        self._begin += sum(map(len, lines))
        self._count -= limit
        return [line[:-1] for line in lines]
