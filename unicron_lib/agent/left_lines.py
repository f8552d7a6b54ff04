"""Lines that a rank leaves for its agent in memory that they share: leaving one takes no system call and wakes nobody.

One ring of bytes with one writer and one reader, who looks when he likes. What was left is there to be read also when the rank
was killed meanwhile.
"""

import logging
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)
LINES_FILE = "UNICRON_LINES_FILE"
RING = 64 << 10
"""About 200 lines: with iterations of 50 ms, what an agent that does not look for 10 s has missed."""
_COUNT, _HEAD = struct.Struct("@Q"), struct.Struct("@II")
_LEFT_AT, _READ_AT, _RING_AT = 0, 8, 16
SIZE = _RING_AT + RING


def lines_path(directory: Path, job: str, generation: int, rank: int) -> Path:
    """Where a rank leaves its lines, below the agent's private directory."""
    return directory / "beats" / f"{job}-g{generation}-r{rank}.lines"


class LineWriter:
    """The rank's end."""

    def __init__(self, path: Path) -> None:
        """Make the ring; raises OSError if that cannot be, or if there is one: it has its writer."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)  # a page that is not there when it is touched kills who touches it
            self._page = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._left = 0
        self._is_full = False

    @classmethod
    def open(cls, path: Path | None) -> Self | None:
        """The ring that the agent has named; None without one, or if it cannot be made."""
        try:
            return None if path is None else cls(path)
        except OSError as error:
            log.warning("every line is sent to the agent at once: %s", error)
            return None

    def leave(self, line: bytes) -> bool:
        """Leave a line; False once there was no room for one: no later line may overtake it here."""
        record = _HEAD.pack(len(line), zlib.crc32(line)) + line
        (read,) = _COUNT.unpack_from(self._page, _READ_AT)
        self._is_full = self._is_full or self._left + len(record) - read > RING
        if not self._is_full:
            self._put(record)
        return not self._is_full

    def _put(self, record: bytes) -> None:
        at = self._left % RING
        first, rest = record[: RING - at], record[RING - at :]
        self._page[_RING_AT + at : _RING_AT + at + len(first)] = first
        self._page[_RING_AT : _RING_AT + len(rest)] = rest
        self._left += len(record)
        _COUNT.pack_into(self._page, _LEFT_AT, self._left)


class LineReader:
    """The agent's end; raises FileNotFoundError as long as the rank has not made its ring."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < SIZE:
                raise FileNotFoundError(f"{path} is not made yet")
            self._page = mmap.mmap(file.fileno(), SIZE)
        self._read = 0

    def read(self) -> list[bytes]:
        """The lines that were left since the last time. What is not all there yet is read the next time."""
        (left,) = _COUNT.unpack_from(self._page, _LEFT_AT)
        data = self._taken(left - self._read) if 0 < left - self._read <= RING else b""
        lines, at = [], 0
        while len(data) - at >= _HEAD.size:
            length, digest = _HEAD.unpack_from(data, at)
            line = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(line) < length or zlib.crc32(line) != digest:
                break
            lines.append(line)
            at += _HEAD.size + length
        self._read += at
        _COUNT.pack_into(self._page, _READ_AT, self._read)
        return lines

    def _taken(self, length: int) -> bytes:
        at = _RING_AT + self._read % RING
        first = self._page[at : min(at + length, SIZE)]
        return first + self._page[_RING_AT : _RING_AT + length - len(first)]

    def close(self) -> None:
        """Nobody reads here any more."""
        self._page.close()
        self._path.unlink(missing_ok=True)
