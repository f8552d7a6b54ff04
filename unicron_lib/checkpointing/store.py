"""The one interface to the object store; `adapters` implements it for S3 and for a directory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What moving one large object took. `attempts` counts requests that moved data: above `parts`, some were repeated."""

    num_bytes: int
    elapsed_s: float
    parts: int = 1
    attempts: int = 1


Arrived = Callable[[int], None]
"""Told how many leading bytes of a download are there: never fewer than before, from the thread that asked for it."""


def ignore(_num_bytes: int) -> None:
    """An `Arrived` for whoever does not want to know."""


class ObjectStore(Protocol):
    """Objects by key. Keys are relative to the store's prefix; methods block and are safe to call from threads.

    All methods raise StoreError when the store fails or is out of reach. `upload` and `download` are for large objects: in
    parts, several at a time, of bounded memory beside the caller's; they return or raise StoreError within `deadline_s`.
    """

    @property
    def url(self) -> str:
        """`s3://bucket/prefix` or `file:///dir`: `open_store(url)` in any process gives the same store."""
        ...

    def get(self, key: str) -> bytes:
        """The object; raises ObjectNotFound."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite; durable on return."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write if there is nothing under `key`; False if there is, unless it is exactly `data` (our own lost answer)."""
        ...

    def upload(self, key: str, data: memoryview, *, deadline_s: float) -> Transfer:
        """Write or overwrite a large object; durable on return. `data`, which is bytes, must not change meanwhile.

        One that fails leaves nothing behind if it can, else what `unfinished` tells of.
        """
        ...

    def download(self, key: str, into: memoryview, *, deadline_s: float, arrived: Arrived = ignore) -> Transfer:
        """Fill `into` with the object; raises ObjectNotFound, or StoreError if it has another size."""
        ...

    def unfinished(self, prefix: str) -> list[str]:
        """Keys with that prefix that an upload was begun for, and neither finished nor given up: its writer may have died."""
        ...

    def give_up(self, key: str) -> None:
        """Remove what unfinished uploads of exactly this key have left; whoever still works on one will fail."""
        ...

    def size(self, key: str) -> int:
        """Bytes of the object, without reading it; raises ObjectNotFound."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        """Keys with that prefix in lexicographical order, only those after `start_after`."""
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """The keys of `list`, in its order, with the bytes of each object: one request for a thousand of them."""
        ...

    def delete(self, key: str) -> None:
        """Remove; no error if it is not there."""
        ...
