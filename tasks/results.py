"""Where Prefect keeps task results: in the object store of the cluster, beside the journal."""

import asyncio
from functools import cache

from prefect.filesystems import WritableFileSystem

from unicron_lib.adapters.stores import open_store

BLOCK_NAME = "cluster"
_store = cache(open_store)  # a boto3 client takes a tenth of a second to build


class UnicronStore(WritableFileSystem):
    """A Prefect storage block over Unicron's object store."""

    _block_type_slug = "unicron-store"
    _block_type_name = "Unicron object store"

    url: str

    async def read_path(self, path: str) -> bytes:
        """The object under `path`."""
        return await asyncio.to_thread(_store(self.url).get, f"results/{path}")

    async def write_path(self, path: str, content: bytes) -> None:
        """Write the object under `path`."""
        await asyncio.to_thread(_store(self.url).put, f"results/{path}", content)
