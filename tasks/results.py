"""Where Prefect keeps task results: in the object store of the cluster, beside the journal."""

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from prefect.filesystems import WritableFileSystem
from prefect.serializers import JSONSerializer

from unicron_lib.adapters.stores import open_store
from unicron_lib.domain.plans import Plan
from unicron_lib.errors import StoreError

BLOCK_NAME = "cluster"
SERIALIZER = JSONSerializer().model_dump()
KNOWN = {f"{Plan.__module__}.{Plan.__qualname__}"}
"""The classes of ours that results are of; all else in them is plain JSON."""
_store = cache(open_store)  # a boto3 client takes a tenth of a second to build


class UnicronStore(WritableFileSystem):
    """A Prefect storage block over Unicron's object store."""

    _block_type_slug = "unicron-store"
    _block_type_name = "Unicron object store"

    url: str

    async def read_path(self, path: str) -> bytes:
        """The object under `path`; raises StoreError if it names code of others to be read by."""
        content = await asyncio.to_thread(_store(self.url).get, f"results/{path}")
        if reason := why_refused(content):
            raise StoreError(f"results/{path} is not read: {reason}")
        return content

    async def write_path(self, path: str, content: bytes) -> None:
        """Write the object under `path`."""
        await asyncio.to_thread(_store(self.url).put, f"results/{path}", content)


def why_refused(content: bytes) -> str:
    """Why a record is not given to Prefect, "" if it may be.

    Prefect reads a record with the serializer that the record itself names, pickle if none, and has JSON make instances of
    whatever importable name is in it.
    """
    try:
        record = json.loads(content)
        serializer, result = record["metadata"]["serializer"], json.loads(record["result"])
        is_plain, names = SERIALIZER | serializer == SERIALIZER, set(_names(result))
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it is no record of a result in JSON"
    if not is_plain:
        return f"it asks for the serializer {str(serializer)[:80]}"
    return "" if names <= KNOWN else f"it asks for {', '.join(sorted(map(str, names - KNOWN)))[:80]}"


def _names(value: Any) -> Iterator[Any]:
    """The names by which a result, at any depth, asks for code."""
    match value:
        case dict():
            yield from (value[key] for key in ("__class__", "__exc_type__") if key in value)
            for part in value.values():
                yield from _names(part)
        case list():
            for part in value:
                yield from _names(part)
