"""The one interface to the object store; `adapters` implements it for S3 and for a directory."""

from typing import Protocol


class ObjectStore(Protocol):
    """Objects by key. Keys are relative to the store's prefix; methods block and are safe to call from threads.

    All methods raise StoreError when the store fails or is out of reach.
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

    def size(self, key: str) -> int:
        """Bytes of the object, without reading it; raises ObjectNotFound."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        """Keys with that prefix in lexicographical order, only those after `start_after`."""
        ...

    def delete(self, key: str) -> None:
        """Remove; no error if it is not there."""
        ...
