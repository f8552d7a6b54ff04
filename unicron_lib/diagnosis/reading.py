"""Logs of any size and any content, block by block: what is held in memory does not depend on the log."""

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

BLOCK_BYTES = 1 << 20
"""What is read at once."""
LINE_BYTES = 64 << 10
"""Of a line that goes on for long, this much of its head and of its tail is kept."""
TEXT_LIMIT = 2000
"""Characters of a line that are passed on: more of its head than of its tail."""

_GAP = b" [...] "
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]{0,32}+[ -/]{0,4}+[@-~]|\][^\x07\x1b\n]{0,256}+(?:\x07|\x1b\\)|[ -Z\\^-~])")
CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n") + b"\x7f"
"""Characters that say nothing; NUL among them, which a log that was cut while it was written begins with."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some lines, joined by newlines, without colours. Line `i` of them has the number `numbers[i]` in its file.

    `num_bytes` is what was read for them.
    What stands between two carriage returns is a line of its own here, though not in the file: progress bars write so.
    """

    text: bytes
    numbers: Sequence[int]
    num_bytes: int


def read(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The blocks of a log, which may be compressed (`.gz`). Raises OSError if it cannot be read."""
    return blocks(_chunks(path, block_bytes), block_bytes)


def blocks(chunks: Iterator[bytes], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Lines of what comes in chunks: whole ones, but for the middle of very long ones."""
    number, rest, num_bytes = 1, b"", 0
    for chunk in chunks:
        num_bytes += len(chunk)
        whole, end, rest = _parted(rest + chunk, block_bytes)
        if end:
            yield _block(whole, number, num_bytes)
            number += whole.count(b"\n") + (end == b"\n")
            num_bytes = 0
    if rest:
        yield _block(rest, number, num_bytes)


def _parted(data: bytes, block_bytes: int) -> tuple[bytes, bytes, bytes]:
    """Whole lines, what ends them (nothing if there are none), and what is left."""
    whole, end, rest = data.rpartition(b"\n")
    if not end and len(data) >= block_bytes:
        whole, end, rest = data.rpartition(b"\r")
    return whole, end, _cut(rest)


def clean(line: bytes) -> str:
    """The text of a line: at most `TEXT_LIMIT` characters, what is no UTF-8 replaced, without control characters."""
    if len(line) > 4 * TEXT_LIMIT:
        line = line[: 3 * TEXT_LIMIT] + _GAP + line[-TEXT_LIMIT:]
    text = line.translate(None, CONTROLS).decode(errors="replace")
    if len(text) > TEXT_LIMIT:
        text = f"{text[: TEXT_LIMIT - 600]}{_GAP.decode()}{text[-500:]}"
    return text


def _chunks(path: Path, size: int) -> Iterator[bytes]:
    if path.suffix != ".gz" and path.is_file():
        yield from _reopened(path, size)
        return
    with _opened(path) as stream:
        yield from _while_sound(stream, size)


def _opened(path: Path) -> BufferedReader | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _reopened(path: Path, size: int) -> Iterator[bytes]:
    """Held open for no longer than a read takes: a job has more ranks than a process may have open files."""
    position = 0
    while True:
        with path.open("rb", buffering=0) as stream:
            stream.seek(position)
            chunk = stream.read(size)
        if not chunk:
            return
        position += len(chunk)
        yield chunk


def _while_sound(stream: BufferedReader | gzip.GzipFile, size: int) -> Iterator[bytes]:
    """A compressed log that is still being written, or is damaged, is read up to where it breaks off."""
    try:
        yield from iter(partial(stream.read1, size), b"")
    except (EOFError, zlib.error):
        return


def _block(text: bytes, number: int, num_bytes: int) -> Block:
    if b"\x1b" in text:
        text = b"".join(_ESCAPES.split(text))  # sub takes half as long again
    if b"\r" not in text:
        return Block(text, range(number, number + text.count(b"\n") + 1), num_bytes)
    lines = text.replace(b"\r\n", b"\n").removesuffix(b"\r").split(b"\n")
    numbers = [at for at, line in enumerate(lines, number) for _ in range(line.count(b"\r") + 1)]
    return Block(b"\n".join(lines).replace(b"\r", b"\n"), numbers, num_bytes)


def _cut(line: bytes) -> bytes:
    return line[:LINE_BYTES] + _GAP + line[-LINE_BYTES:] if len(line) > 2 * LINE_BYTES + len(_GAP) else line
