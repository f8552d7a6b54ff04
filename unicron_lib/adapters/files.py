"""An object store in a directory, for one machine: durable, and atomic also against a power cut."""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unicron_lib.adapters.keys import check_key, check_prefix
from unicron_lib.errors import ObjectNotFound, StoreError

NEVER_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})


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
        with self._explained(key), self._written(path, data) as temporary:
            temporary.rename(path)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write if there is nothing under `key`; False if there is, unless it is exactly `data`."""
        path = self._path(key)
        with self._explained(key), self._written(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return path.read_bytes() == data
        return True

    def size(self, key: str) -> int:
        """Bytes of the object; raises ObjectNotFound."""
        path = self._path(key)
        with self._explained(key):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a directory")
            return path.stat().st_size

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        """Keys with that prefix in lexicographical order, only those after `start_after`."""
        top = self._root / check_prefix(prefix).rpartition("/")[0]
        with self._explained(prefix):
            walk = os.walk(top, onerror=_raise_unless_absent)
            paths = [Path(folder) / name for folder, _, names in walk for name in names if not name.startswith(".")]
        keys = (path.relative_to(self._root).as_posix() for path in paths)
        return sorted(key for key in keys if key.startswith(prefix) and key > start_after)

    def delete(self, key: str) -> None:
        """Remove; no error if it is not there."""
        path = self._path(key)
        with self._explained(key):
            if path.exists():
                path.unlink(missing_ok=True)
                _sync_directory(path.parent)

    def check(self) -> None:
        """Raise StoreError when objects could not be written here."""
        with self._explained(self.url), self._written(self._root / "probe", b""):
            pass

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextmanager
    def _written(self, path: Path, data: bytes) -> Iterator[Path]:
        """A synced temporary file beside `path`; the directory is synced once the block has given it its name."""
        _make_directories(path.parent)
        temporary = path.parent / f".{uuid.uuid4().hex}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
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
