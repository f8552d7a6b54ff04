"""An object store in memory; it passes the same contract tests as the real ones."""

import threading

from unicron_lib.adapters.keys import check_key, check_prefix
from unicron_lib.checkpointing.store import Arrived, Transfer, ignore
from unicron_lib.errors import ObjectNotFound, StoreError


class MemoryStore:
    """Objects in a dict, and uploads that were begun."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.begun: set[str] = set()
        self._lock = threading.Lock()

    url = "memory:///"

    def get(self, key: str) -> bytes:
        if check_key(key) not in self.objects:
            raise ObjectNotFound(f"{self.url} has no object {key!r}")
        return self.objects[key]

    def put(self, key: str, data: bytes) -> None:
        self.objects[check_key(key)] = bytes(data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            return self.objects.setdefault(check_key(key), bytes(data)) == data

    def upload(self, key: str, data: memoryview, *, deadline_s: float) -> Transfer:
        self.begin(key)
        self._refuse_if_over(deadline_s)
        self.put(key, bytes(data))
        self.begun.discard(key)
        return Transfer(num_bytes=data.nbytes, elapsed_s=0.0)

    def begin(self, key: str) -> None:
        """What an upload does first; a writer that dies then leaves that."""
        self.begun.add(check_key(key))

    def download(self, key: str, into: memoryview, *, deadline_s: float, arrived: Arrived = ignore) -> Transfer:
        data = self.get(key)
        if len(data) != into.nbytes:
            raise StoreError(f"{self.url}: {key!r} does not have {into.nbytes} bytes")
        self._refuse_if_over(deadline_s)
        into[:] = data
        if data:
            arrived(len(data))
        return Transfer(num_bytes=len(data), elapsed_s=0.0)

    def _refuse_if_over(self, deadline_s: float) -> None:
        if deadline_s <= 0:
            self.begun.clear()
            raise StoreError(f"the transfer took longer than {deadline_s:g} s")

    def unfinished(self, prefix: str) -> list[str]:
        return sorted(key for key in self.begun if key.startswith(check_prefix(prefix)))

    def give_up(self, key: str) -> None:
        self.begun.discard(check_key(key))

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        check_prefix(prefix)
        return sorted(key for key in list(self.objects) if key.startswith(prefix) and key > start_after)

    def sizes(self, prefix: str) -> dict[str, int]:
        return {key: len(self.objects[key]) for key in self.list(prefix)}

    def delete(self, key: str) -> None:
        self.objects.pop(check_key(key), None)
