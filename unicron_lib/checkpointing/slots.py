"""A state in host memory that outlives its process: two files a job and node below /dev/shm, written in turn.

Where a state is cut, each part has its own two files, and a third one for what is to travel to another node. When all parts of
an iteration have, this one's is put aside until those of the next have, too: it is the iteration of which there are copies.

The header is in a file's first page. It is wiped before the state behind it changes, and written once that is complete: a
writer that is killed leaves a slot without a header, which nobody uses, and the other one is whole. Writers lock a slot
exclusively, readers share it; the kernel lifts the locks of the dead.
"""

import fcntl
import hashlib
import math
import mmap
import os
import re
import stat
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from unicron_lib.checkpointing.room import room_of, shortage
from unicron_lib.domain.jobs import NAME
from unicron_lib.errors import SlotError

Place = tuple[int, int]
"""Generation and iteration: of two slots of a job, the greater place is further."""
HEADER_BYTES = mmap.PAGESIZE
MAGIC = b"UNISLOT1"
LARGEST = 10**10 - 1
TRAVELLED_AT = HEADER_BYTES - 1
"""The byte of a first page that is not 0 if the state behind it is on another node, too."""
BLOCK_WORDS = 1 << 17
IN_TURN, TRAVELS, ASIDE = (0, 1), (2,), 3
"""The numbers of the slots that are written in turn, of the one whose state goes to another node, and where it is put then."""
ALL = (*IN_TURN, *TRAVELS, ASIDE)
PART = re.compile(r"(tp\d{1,6}of\d{1,6}-pp\d{1,6}of\d{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """The state of `job` after `iteration` (0-based), which `generation` has applied or loaded; `digest` is of `num_bytes`.

    `loss` is that iteration's, the mean over its global batch. `part` names what of the state it is, "" for all of it. Raises
    ValueError for what cannot be.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    job: str
    generation: int
    iteration: int
    consumed_samples: int
    loss: float
    num_bytes: int
    digest: str
    part: str = ""
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        numbers = (self.generation, self.iteration, self.consumed_samples)
        if not NAME.fullmatch(self.job) or not math.isfinite(self.loss) or len(self.digest) > 64:
            raise ValueError("a job's name, loss or digest is impossible")
        if not PART.fullmatch(self.part):
            raise ValueError("the name of a part is impossible")
        if min(numbers) < 0 or max(self.generation, self.iteration) > LARGEST or not 0 < self.num_bytes < 1 << 60:
            raise ValueError("a number is out of bounds")

    @property
    def place(self) -> Place:
        """How far it is."""
        return self.generation, self.iteration


header_json: TypeAdapter[SlotHeader] = TypeAdapter(SlotHeader)


def encode(header: SlotHeader) -> bytes:
    """The first page of a slot."""
    told = header_json.dump_json(header)
    page = MAGIC + len(told).to_bytes(4, "little") + zlib.crc32(told).to_bytes(4, "little") + told
    return page.ljust(HEADER_BYTES, b"\0")


def decode(page: bytes) -> SlotHeader | None:
    """The header on a first page, None if there is none that is whole."""
    length, crc = int.from_bytes(page[8:12], "little"), int.from_bytes(page[12:16], "little")
    told = page[16 : 16 + length]
    if page[:8] != MAGIC or length > TRAVELLED_AT - 16 or zlib.crc32(told) != crc:
        return None
    try:
        return header_json.validate_json(told)
    except ValidationError:
        return None


def digest_of(data: memoryview) -> str:
    """Tells damage, not malice, at the speed of memory: SHA-256 over the sums of blocks of 1 MiB, as 64-bit words."""
    words = np.frombuffer(data[: len(data) // 8 * 8], dtype=np.uint64)
    whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    sums = np.add.reduce(words[:whole].reshape(-1, BLOCK_WORDS), axis=1)
    digest = hashlib.sha256(sums.tobytes())
    digest.update(data[8 * whole :])
    return digest.hexdigest()


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
            for directory in (self.directory.parent, self.directory):
                directory.mkdir(mode=0o700, exist_ok=True)
            self._refuse_what_others_could_write()
            for name in sorted(self._names, key=self._place_of):
                mapped = self._open(name, HEADER_BYTES + num_bytes)
                if mapped:
                    mapped.view[:8] = bytes(8)
                    return Claim(mapped, num_bytes)
        except OSError as error:
            raise SlotError(f"no state can be kept in {self.directory}: {error.strerror}") from error
        return None

    def _refuse_what_others_could_write(self) -> None:
        for directory in (self.directory.parent, self.directory):
            if not is_own(directory):
                raise SlotError(f"no state is kept in {directory}, which others may write to: remove it")

    def _place_of(self, name: str) -> Place:
        header = _read_header(self.directory / name)
        return header.place if header else (-1, -1)

    def _open(self, name: str, size: int) -> "_Mapped | None":
        """A slot of that size, mapped and locked; None if somebody else uses it."""
        known, path = self._mapped.get(name), self.directory / name
        if known and known.is_at(path) and len(known.view) == size:
            return known if _lock(known.descriptor, fcntl.LOCK_EX) else None
        if known:
            del self._mapped[name]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _lock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return None
        try:
            self._take_memory(descriptor, size)
            self._mapped[name] = _Mapped(descriptor, size)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return self._mapped[name]

    def _take_memory(self, descriptor: int, size: int) -> None:
        """Have all of it now: later a write into what is not there would kill the process."""
        more = size - os.fstat(descriptor).st_blocks * 512
        if more > 0 and (reason := shortage(more, room_of(self.directory))):
            raise SlotError(f"no state is kept in memory: {reason}")
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)

    @contextmanager
    def reading(self, place: Place) -> Iterator[tuple[SlotHeader, memoryview]]:
        """A slot that nobody writes meanwhile, with its state; raises SlotError if there is none of that place (any more)."""
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
                try:  # writable for those who want no copy; what they write is theirs alone
                    yield header, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[HEADER_BYTES:]
                finally:
                    _unlock(file.fileno())  # the mapping keeps the file open as long as it is used
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
        self.descriptor = descriptor
        self.view = memoryview(mmap.mmap(descriptor, size))
        weakref.finalize(self, os.close, descriptor)

    def is_at(self, path: Path) -> bool:
        """Whether it is still the file of that name."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), path.stat())
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


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)
