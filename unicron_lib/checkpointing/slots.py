"""A state in host memory that outlives its process: two files a job and node below /dev/shm, written in turn.

Where a state is cut, each part has its own two files, and a third one for what is to travel to another node. When all parts of
an iteration have, this one's is put aside until those of the next have, too: it is the iteration of which there are copies.

The header is in a file's first page. It is wiped before the state behind it changes, and written once that is complete: a
writer that is killed leaves a slot without a header, which nobody uses, and the other one is whole. Writers lock a slot
exclusively, readers share it; the kernel lifts the locks of the dead.
"""

import errno
import fcntl
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from unicron_lib.checkpointing.room import PROMISES, room_of
from unicron_lib.checkpointing.slot_digest import digest_of
from unicron_lib.checkpointing.slot_header import HEADER_BYTES, PART, TRAVELLED_AT, Place, SlotHeader, decode, encode
from unicron_lib.errors import SlotError

IN_TURN, TRAVELS, ASIDE = (0, 1), (2,), 3
"""The numbers of the slots that are written in turn, of the one whose state goes to another node, and where it is put then."""
ALL = (*IN_TURN, *TRAVELS, ASIDE)


class Claim:
    """A slot that is being written: `data` is free to be filled; only `commit` makes it count."""

    def __init__(self, mapped: "_Mapped", num_bytes: int) -> None:
        self._mapped = mapped
        self.data = mapped.view[HEADER_BYTES : HEADER_BYTES + num_bytes]

    def commit(self, header: SlotHeader) -> None:
        """The state is complete, and has the header's digest; ends the claim."""
        page = encode(header)
        self._mapped.view[8:HEADER_BYTES] = page[8:]
        self._mapped.view[:8] = page[:8]
        self.release()

    def release(self) -> None:
        """End the claim; what was not committed does not count."""
        _unlock(self._mapped.descriptor)


class FileClaim:
    """A slot that is filled as a file, which costs no page faults: its state begins at HEADER_BYTES of `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_whole = False

    def commit(self, header: SlotHeader) -> None:
        """The state is complete, and has the header's digest."""
        page = encode(header)
        os.pwrite(self.descriptor, page[8:], 8)
        os.pwrite(self.descriptor, page[:8], 0)
        self.is_whole = True


class SlotPair:
    """The two slots of one job's state, or of a `part` of it, on one node, in `directory`; or those of other `numbers`.

    Each method may run in any process beside any other.
    """

    def __init__(self, directory: Path, part: str = "", numbers: tuple[int, ...] = IN_TURN) -> None:
        self.directory = directory
        self.part = part
        self._names = tuple(f"{part}.{number}.slot" if part else f"{number}.slot" for number in numbers)
        self._mapped: dict[str, _Mapped] = {}

    def found(self) -> list[SlotHeader]:
        """The headers of the slots that are whole as far as these tell, the furthest first."""
        headers = (header for name in self._names if (header := _read_header(self.directory / name)))
        return sorted(headers, key=lambda header: header.place, reverse=True)

    def claim(self, num_bytes: int) -> Claim | None:
        """The slot that counts least, locked and without its header; None while both are in use.

        Raises SlotError if there is no memory for it, or it cannot be made.
        """
        try:
            for path in self._in_turn():
                mapped = self._mapped_at(path, HEADER_BYTES + num_bytes)
                if mapped:
                    mapped.view[:8] = bytes(8)
                    return Claim(mapped, num_bytes)
        except OSError as error:
            raise self._not_kept(error) from error
        return None

    @contextmanager
    def receiving(self, num_bytes: int) -> Iterator[FileClaim]:
        """As `claim`, but to be written to in the block, as a file; of what is not committed there nothing is kept.

        Raises SlotError if both slots are in use, too, and where there is no memory for what is written.
        """
        try:
            path, descriptor = self._first_free(HEADER_BYTES + num_bytes)
        except OSError as error:
            raise self._not_kept(error) from error
        claim = FileClaim(descriptor)
        try:
            os.pwrite(descriptor, bytes(8), 0)
            yield claim
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._not_kept(error) from error
        finally:
            if not claim.is_whole:
                path.unlink(missing_ok=True)  # not cut: a rank may have mapped it
            PROMISES.keep(descriptor)
            _unlock(descriptor)
            os.close(descriptor)

    def _first_free(self, size: int) -> tuple[Path, int]:
        for path in self._in_turn():
            descriptor = self._open(path, size)
            if descriptor is not None:
                return path, descriptor
        raise SlotError(f"both slots of {self.directory.name} are in use")

    def _in_turn(self) -> list[Path]:
        """The slots, that which counts least first, in a directory that is there."""
        for directory in (self.directory.parent, self.directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        self._refuse_what_others_could_write()
        return [self.directory / name for name in sorted(self._names, key=self._place_of)]

    def _not_kept(self, error: OSError) -> SlotError:
        return SlotError(f"no state can be kept in {self.directory}: {error.strerror}")

    def _refuse_what_others_could_write(self) -> None:
        for directory in (self.directory.parent, self.directory):
            if not is_own(directory):
                raise SlotError(f"no state is kept in {directory}, which others may write to: remove it")

    def _place_of(self, name: str) -> Place:
        header = _read_header(self.directory / name)
        return header.place if header else (-1, -1)

    def _mapped_at(self, path: Path, size: int) -> "_Mapped | None":
        """A slot of that size, mapped and locked; None if somebody else uses it."""
        known = self._mapped.get(path.name)
        if known and len(known.view) == size and _lock(known.descriptor, fcntl.LOCK_EX):
            if known.is_at(path):
                return known
            _unlock(known.descriptor)
        descriptor = self._open(path, size, is_all_there=True)
        if descriptor is None:
            return None
        self._mapped[path.name] = _Mapped(descriptor, size)
        return self._mapped[path.name]

    def _open(self, path: Path, size: int, *, is_all_there: bool = False) -> int | None:
        """A slot of that size, locked; None if somebody else uses it.

        What is to be mapped `is_all_there` now: later a write into what is not would kill the process.
        """
        descriptor = _locked(path)
        if descriptor is None:
            return None
        try:
            self._promise(descriptor, size)
            os.ftruncate(descriptor, size)
            if is_all_there:
                os.posix_fallocate(descriptor, 0, size)
                PROMISES.keep(descriptor)
        except BaseException:
            PROMISES.keep(descriptor)
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return descriptor

    def _promise(self, descriptor: int, size: int) -> None:
        if reason := PROMISES.make(descriptor, size, lambda: room_of(self.directory)):
            raise SlotError(f"no state is kept in memory: {reason}")

    @contextmanager
    def reading(self, place: Place) -> Iterator[tuple[SlotHeader, memoryview]]:
        """A slot that nobody writes meanwhile, with its state; raises SlotError if there is none of that place (any more)."""
        with self.reading_file(place) as (header, file):  # the mapping keeps it open as long as it is used
            # writable for those who want no copy; what they write is theirs alone
            yield header, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[HEADER_BYTES:]

    @contextmanager
    def reading_file(self, place: Place) -> Iterator[tuple[SlotHeader, BinaryIO]]:
        """As `reading`, with the slot's file, in which the state begins at HEADER_BYTES."""
        if self.directory.is_dir():
            self._refuse_what_others_could_write()
        for name in self._names:
            path = self.directory / name
            if self._place_of(name) != place:
                continue
            with path.open("rb") as file:
                if not _lock(file.fileno(), fcntl.LOCK_SH):
                    continue
                header = decode(os.pread(file.fileno(), HEADER_BYTES, 0))
                if header is None or (header.place, header.part) != (place, self.part):
                    continue
                if os.fstat(file.fileno()).st_size != HEADER_BYTES + header.num_bytes:
                    raise SlotError(f"{path} has another size than its header says")
                try:
                    yield header, file
                finally:
                    _unlock(file.fileno())
                return
        raise SlotError(f"there is no slot of iteration {place[1]} of generation {place[0]} in {self.directory}")

    def check(self, place: Place) -> SlotHeader:
        """The header of a slot whose state has been compared with it; raises SlotError."""
        with self.reading(place) as (header, data):
            if digest_of(data) != header.digest:
                raise SlotError(f"the slot of iteration {header.iteration} is damaged: its header tells of another digest")
            return header

    def forget(self, below_generation: int) -> int:
        """Remove the slots of generations below; the number of them."""
        removed = 0
        for name in self._names:
            path = self.directory / name
            header = _read_header(path)
            if path.exists() and (header is None or header.generation < below_generation):
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def mark_travelled(self, place: Place) -> None:
        """What is in the first slot, if it is of that place, is on another node, too."""
        with suppress(FileNotFoundError), (self.directory / self._names[0]).open("r+b", buffering=0) as file:
            if _lock(file.fileno(), fcntl.LOCK_EX):
                header = decode(os.pread(file.fileno(), HEADER_BYTES, 0))
                if header is not None and header.place == place:
                    os.pwrite(file.fileno(), b"\1", TRAVELLED_AT)

    @property
    def has_travelled(self) -> bool:
        """Whether what is in the first slot is marked so."""
        try:
            with (self.directory / self._names[0]).open("rb") as file:
                return any(os.pread(file.fileno(), 1, TRAVELLED_AT))
        except OSError:
            return False

    def put_aside(self) -> None:
        """Keep what has travelled in place of what was put aside before; the next state in its slot begins a new file."""
        if self.has_travelled:
            path, part = self.directory / self._names[0], f"{self.part}." if self.part else ""
            path.replace(self.directory / f"{part}{ASIDE}.slot")


class _Mapped:
    """An open slot, closed with its last user. Its memory stays until then, whether its file is there or not."""

    def __init__(self, descriptor: int, size: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self.view = memoryview(mmap.mmap(descriptor, size))

    def is_at(self, path: Path) -> bool:
        """Whether it is still the file of that name, and all there: who has begun to receive another state may have cut it."""
        try:
            found = os.fstat(self.descriptor)
            return os.path.samestat(found, path.stat()) and found.st_blocks * 512 >= found.st_size == len(self.view)
        except OSError:
            return False


def parts_in(directory: Path) -> list[str]:
    """The names of the parts that slots in `directory` are of; "" stands for whole states."""
    found = {path.name.removesuffix(".slot").rpartition(".")[0] for path in directory.glob("*.slot")}
    return sorted(part for part in found if PART.fullmatch(part))


def is_own(directory: Path) -> bool:
    """Whether nobody but this user can put anything into a directory, which is there."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _read_header(path: Path) -> SlotHeader | None:
    try:
        with path.open("rb") as file:
            return decode(file.read(HEADER_BYTES))
    except OSError:
        return None


def _locked(path: Path) -> int | None:
    """A slot's file, made if need be, which nobody else uses; None if somebody does."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # its last user has removed it meanwhile


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)
