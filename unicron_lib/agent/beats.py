"""The beat page: a rank's signs of life in memory that it shares with its agent. Writing one takes no system call.

A page has one writer and any number of readers. A sequence number, odd while the page is being written, tells a reader that
it has seen half of it.
"""

import logging
import mmap
import os
import struct
import time
from pathlib import Path

from unicron_lib.detection.pace import Beat
from unicron_lib.detection.sections import PAUSES, Section

log = logging.getLogger(__name__)
BEAT_FILE = "UNICRON_BEAT_FILE"
_SEQUENCE, _SIGN = struct.Struct("<Q"), struct.Struct("<qQQQqQ")
SIZE = _SEQUENCE.size + _SIGN.size
_SECTIONS = tuple(Section)
_NUMBERS = {section: number for number, section in enumerate(_SECTIONS)}
_PAUSE_OF: dict[int, Section | None] = {0: None} | {number + 1: it for it, number in _NUMBERS.items() if it in PAUSES}
_PAUSES = {section: number for number, section in _PAUSE_OF.items()}


def beat_path(directory: Path, job: str, generation: int, rank: int) -> Path:
    """Where the page of a rank is, below the agent's private directory."""
    return directory / "beats" / f"{job}-g{generation}-r{rank}"


class BeatWriter:
    """The rank's end."""

    def __init__(self, path: Path | None) -> None:
        """Map the page at `path`; without one, nobody looks. Raises OSError if it cannot be made."""
        self._page = mmap.mmap(-1, SIZE) if path is None else _create(path)
        self._sequence = self._marks = 0
        self._iteration = -1
        self._iteration_ns = 0
        self._section, self._pause = _NUMBERS[Section.SETUP], _PAUSES[None]
        self.mark()

    @classmethod
    def open(cls, path: Path | None) -> "BeatWriter":
        """The page that the agent has named; without one, or if it cannot be made, nobody looks."""
        try:
            return cls(path)
        except OSError as error:
            log.warning("nobody sees whether this rank lives: %s", error)
            return cls(None)

    def mark(self, section: Section | None = None) -> None:
        """Tell that the rank lives, and in which section it is from now on. A pause is remembered until `complete`."""
        if section is not None:
            self._section = _NUMBERS[section]
            self._pause = _PAUSES.get(section, self._pause)
        self._marks += 1
        page, sequence = self._page, self._sequence
        _SEQUENCE.pack_into(page, 0, sequence + 1)
        now_ns = time.monotonic_ns()
        _SIGN.pack_into(page, 8, self._iteration, self._section, self._marks, now_ns, self._iteration_ns, self._pause)
        _SEQUENCE.pack_into(page, 0, sequence + 2)
        self._sequence = sequence + 2

    def complete(self, iteration: int, duration_s: float) -> None:
        """Tell that an iteration is done, with the next mark; `duration_s` without checkpoints and evaluations."""
        self._iteration, self._iteration_ns, self._pause = iteration, int(duration_s * 1e9), _PAUSES[None]


class BeatReader:
    """The agent's end; raises FileNotFoundError as long as the rank has not made its page."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < SIZE:
                raise FileNotFoundError(f"{path} is not written yet")
            self._page = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        self._newest: Beat | None = None

    def read(self) -> Beat | None:
        """The newest sign; the one before it if the rank was stopped while it wrote, None if there was none."""
        before = self._page[: _SEQUENCE.size]
        sign = self._page[_SEQUENCE.size :]
        if before == self._page[: _SEQUENCE.size] and before[0] % 2 == 0 and any(before):
            iteration, section, marks, at_ns, iteration_ns, pause = _SIGN.unpack(sign)
            if section < len(_SECTIONS) and pause in _PAUSE_OF:
                self._newest = Beat(
                    iteration=iteration,
                    section=_SECTIONS[section],
                    marks=marks,
                    at=at_ns / 1e9,
                    iteration_s=iteration_ns / 1e9,
                    pause=_PAUSE_OF[pause],
                )
        return self._newest

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


def _create(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, SIZE)
        return mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)
