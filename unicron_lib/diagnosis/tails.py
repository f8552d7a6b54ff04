"""The end of a log, packed so that it can travel: what a node sends of a rank's log."""

import base64
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 1 << 20
"""Of a log that is longer, so much of its end is sent."""
PACKED_BYTES = 192 << 10
"""What is sent has at most so many bytes; of what packs badly, less is sent."""
COUNTED_BYTES = 64 << 20
"""Lines before the end are counted in so many bytes at most, so that a huge log is not read for the sake of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The end of the log `file`, from line `first_line` on (0: not counted). `packed` is base64 of what zlib made of it."""

    file: str
    packed: str
    first_line: int = 1

    def unpacked(self) -> bytes:
        """The text. Raises ValueError if it is damaged."""
        try:
            return zlib.decompressobj().decompress(base64.b64decode(self.packed, validate=True), TAIL_BYTES)
        except zlib.error as error:
            raise ValueError(f"the end of {self.file} is damaged: {error}") from error


def packed_tail(path: Path) -> Tail:
    """The end of a log, in whole lines if it has any. Raises OSError if it cannot be read."""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        length = min(size, TAIL_BYTES)
        while True:
            begin = size - length
            stream.seek(begin)
            data = stream.read(length)
            begin, data = (begin, data) if not begin else _from_a_line_on(begin, data)
            packed = zlib.compress(data)
            if len(packed) <= PACKED_BYTES:
                break
            length //= 2
        first_line = _lines_before(path, begin) + 1 if begin <= COUNTED_BYTES else 0
    return Tail(file=str(path), packed=base64.b64encode(packed).decode(), first_line=first_line)


def _from_a_line_on(begin: int, data: bytes) -> tuple[int, bytes]:
    cut = data.find(b"\n") + 1
    return begin + cut, data[cut:]


def _lines_before(path: Path, end: int) -> int:
    count = 0
    with path.open("rb") as stream:
        while end > 0 and (chunk := stream.read(min(end, TAIL_BYTES))):
            count += chunk.count(b"\n")
            end -= len(chunk)
    return count
