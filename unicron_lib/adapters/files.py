"""An object store in a directory, for one machine: durable, and atomic also against a power cut."""

import errno
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unicron_lib.adapters.keys import check_key, check_prefix
from unicron_lib.checkpointing.store import Arrived, Transfer, ignore
from unicron_lib.errors import ObjectNotFound, StoreError

NEVER_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
PIECE_BYTES = 8 << 20
"""The deadline of a transfer is looked at after each; one call of a directory that hangs, as NFS may, cannot be cut short."""
UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{32}\.part")


class FileStore:
    """Objects as files under `root`, which must exist.

    A directory that went away, say with its mount, is a store out of reach and not an empty one.
    A write goes to a temporary file, is synced, and gets its name by `rename` or, where nothing may be there, by `link`,
    which fails for all writers but one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        """`file:///dir`."""
        return self._root.as_uri()

    def get(self, key: str) -> bytes:
        """The object; raises ObjectNotFound."""
        with self._explained(key):
            return self._path(key).read_bytes()

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite; durable on return."""
        path = self._path(key)
        with self._explained(key), self._written(path, memoryview(data)) as temporary:
            temporary.rename(path)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write if there is nothing under `key`; False if there is, unless it is exactly `data`."""
        path = self._path(key)
        with self._explained(key), self._written(path, memoryview(data)) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return path.read_bytes() == data
        return True

    def upload(self, key: str, data: memoryview, *, deadline_s: float) -> Transfer:
        """Write or overwrite a large object; durable on return."""
        path, started = self._path(key), time.monotonic()
        with self._explained(key), self._written(path, data, _Deadline(deadline_s, f"writing {key!r}")) as temporary:
            temporary.rename(path)
        return Transfer(num_bytes=data.nbytes, elapsed_s=time.monotonic() - started)

    def download(self, key: str, into: memoryview, *, deadline_s: float, arrived: Arrived = ignore) -> Transfer:
        """Fill `into` with the object; raises ObjectNotFound, or StoreError if it has another size."""
        path, deadline, started = self._path(key), _Deadline(deadline_s, f"reading {key!r}"), time.monotonic()
        with self._explained(key), path.open("rb", buffering=0) as file:
            done = 0
            while done < into.nbytes and (num_bytes := file.readinto(into[done : done + PIECE_BYTES])):
                done += num_bytes
                arrived(done)
                deadline.check()
            if done < into.nbytes or file.read(1):
                raise StoreError(f"{self.url}: {key!r} does not have {into.nbytes} bytes")
        return Transfer(num_bytes=done, elapsed_s=time.monotonic() - started)

    def unfinished(self, prefix: str) -> list[str]:
        """Keys with that prefix whose writer has not finished, or has died."""
        with self._explained(prefix):
            parts = (path for path in self._files(prefix) if UNFINISHED.fullmatch(path.name))
            keys = {self._key(path.with_name(UNFINISHED.sub(r"\1", path.name))) for path in parts}
        return sorted(key for key in keys if key.startswith(prefix))

    def give_up(self, key: str) -> None:
        """Remove what unfinished uploads of exactly this key have left."""
        path = self._path(key)
        with self._explained(key):
            for part in path.parent.glob(".*.part"):
                if (match := UNFINISHED.fullmatch(part.name)) and match[1] == path.name:
                    part.unlink(missing_ok=True)

    def size(self, key: str) -> int:
        """Bytes of the object; raises ObjectNotFound."""
        path = self._path(key)
        with self._explained(key):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a directory")
            return path.stat().st_size

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        """Keys with that prefix in lexicographical order, only those after `start_after`."""
        with self._explained(prefix):
            keys = [self._key(path) for path in self._files(prefix) if not path.name.startswith(".")]
        return sorted(key for key in keys if key.startswith(prefix) and key > start_after)

    def sizes(self, prefix: str) -> dict[str, int]:
        """The keys of `list`, in its order, with the bytes of each object."""
        found = {}
        with self._explained(prefix):
            for key in self.list(prefix):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    found[key] = (self._root / key).stat().st_size
        return found

    def delete(self, key: str) -> None:
        """Remove; no error if it is not there."""
        path = self._path(key)
        with self._explained(key):
            if path.exists():
                path.unlink(missing_ok=True)
                _sync_directory(path.parent)

    def check(self) -> None:
        """Raise StoreError when objects could not be written here."""
        with self._explained(self.url), self._written(self._root / "probe", memoryview(b"")):
            pass

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _files(self, prefix: str) -> Iterator[Path]:
        """All files in the directory that the prefix names, and below it."""
        top = self._root / check_prefix(prefix).rpartition("/")[0]
        walk = os.walk(top, onerror=_raise_unless_absent)
        return (Path(folder) / name for folder, _, names in walk for name in names)

    @contextmanager
    def _written(self, path: Path, data: memoryview, deadline: "_Deadline | None" = None) -> Iterator[Path]:
        """A synced temporary file beside `path`; the directory is synced once the block has given it its name."""
        _make_directories(path.parent)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
        try:
            with temporary.open("xb", buffering=0) as file:
                done = 0
                while done < data.nbytes:
                    done += file.write(data[done : done + PIECE_BYTES])
                    if deadline:
                        deadline.check()
                os.fsync(file.fileno())
            yield temporary
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        if not self._root.is_dir():
            raise StoreError(f"{self.url} is out of reach: there is no directory {self._root}")
        try:
            yield
        except OSError as error:
            if error.errno in NEVER_THERE:
                raise ObjectNotFound(f"{self.url} has no object {key!r}") from error
            raise StoreError(f"{self.url} failed on {key!r}: {error.strerror or error}") from error


class _Deadline:
    def __init__(self, limit_s: float, what: str) -> None:
        self._ends_at, self._told = time.monotonic() + limit_s, f"{what} took longer than {limit_s:g} s"

    def check(self) -> None:
        if time.monotonic() > self._ends_at:
            raise StoreError(self._told)


def _raise_unless_absent(error: OSError) -> None:
    """A directory that is not there holds nothing; one that cannot be read might."""
    if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
        raise error


def _make_directories(directory: Path) -> None:
    """Create what is missing and make it durable: a file whose directory is lost is lost."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _sync_directory(new.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
