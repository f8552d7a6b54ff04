"""New lines of a log as they come: the kernel's device, a FIFO, a file that is rotated. It blocks: for a thread of its own."""

import errno
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from unicron_lib.detection.kernel_log import LINE_LIMIT_BYTES

CHUNK_BYTES = 64 << 10
RECORD_BYTES = 8 << 10
"""More than the kernel puts into one record of its device: a smaller buffer makes the read fail."""
BATCH_RECORDS = 256
LOOK_S = 0.1
"""Between two looks at a file's size: the standard library cannot be told of changes."""
PATIENCE_S = 0.5
"""Between two questions whether to stop, while nothing comes."""


def follow(
    path: Path, stopped: Callable[[float], bool], opened: Callable[[], object], *, from_start: bool = False
) -> Iterator[list[bytes]]:
    """Lines that are written from now on, in batches; ends when `stopped`, which waits for the given seconds, says so.

    `opened` is called when nothing written from there on will be missed; a file that is new is read `from_start`. Raises
    OSError if the log cannot be read.
    """
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode):
        return _follow_device(path, stopped, opened)
    if stat.S_ISFIFO(mode):
        return _follow_pipe(path, stopped, opened)
    return _follow_file(path, stopped, opened, from_start=from_start)


def _follow_device(path: Path, stopped: Callable[[float], bool], opened: Callable[[], object]) -> Iterator[list[bytes]]:
    """Each read gives one record of the kernel's log."""
    device = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.lseek(device, 0, os.SEEK_END)
        opened()
        while not stopped(0):
            if records := _records(device):
                yield records
            else:
                _wait_readable(device)
    finally:
        os.close(device)


def _records(device: int) -> list[bytes]:
    """What can be read without waiting, a bounded number of records."""
    records: list[bytes] = []
    while len(records) < BATCH_RECORDS:
        try:
            text, _, _ = os.read(device, RECORD_BYTES).partition(b"\n")  # after the text come the device's properties
            records.append(text)
        except BlockingIOError:
            break
        except OSError as error:
            if error.errno != errno.EPIPE:  # records were overwritten before they were read: what follows is still there
                raise
    return records


def _follow_pipe(path: Path, stopped: Callable[[float], bool], opened: Callable[[], object]) -> Iterator[list[bytes]]:
    """Opened for writing as well, a FIFO has no end when its writers go."""
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    lines = LineSplitter()
    try:
        opened()
        while not stopped(0):
            _wait_readable(pipe)
            with suppress(BlockingIOError):
                yield lines.split(os.read(pipe, CHUNK_BYTES))
    finally:
        os.close(pipe)


def _wait_readable(file: int) -> None:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    poll.poll(PATIENCE_S * 1000)


def _follow_file(
    path: Path, stopped: Callable[[float], bool], opened: Callable[[], object], *, from_start: bool
) -> Iterator[list[bytes]]:
    """By name: when the file is replaced, what is left of the old one and then the new one is read; a shorter one is new."""
    file = os.open(path, os.O_RDONLY)
    lines = LineSplitter()
    try:
        os.lseek(file, 0, os.SEEK_SET if from_start else os.SEEK_END)
        opened()
        while not stopped(0):
            replaced = _is_replaced(path, file)  # asked before the read: the last words of the old file count
            if chunk := os.read(file, CHUNK_BYTES):
                yield lines.split(chunk)
            elif replaced:
                file, lines = _reopen(path, file), LineSplitter()
            elif os.fstat(file).st_size < os.lseek(file, 0, os.SEEK_CUR):
                os.lseek(file, 0, os.SEEK_SET)
            else:
                stopped(LOOK_S)
    finally:
        os.close(file)


def _is_replaced(path: Path, file: int) -> bool:
    """Whether the name leads to another file; while it leads nowhere, the old one counts."""
    try:
        return not os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _reopen(path: Path, file: int) -> int:
    """The file that has the name now; the old one if it has just gone again."""
    try:
        newer = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return file
    os.close(file)
    return newer


class LineSplitter:
    """Cuts what is read into lines; of one that never ends, only the beginning is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, chunk: bytes) -> list[bytes]:
        """The lines that are complete with `chunk`, without their ends."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = rest[:LINE_LIMIT_BYTES]
        else:
            self._rest = (self._rest + rest)[:LINE_LIMIT_BYTES]
        return lines
