"""An object store on S3 or a server that speaks its protocol. What talks to boto3 is here and in `s3_*`."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from unicron_lib.adapters import s3_transfer
from unicron_lib.adapters.keys import check_key, check_prefix
from unicron_lib.adapters.limits import Limit, in_time
from unicron_lib.adapters.s3_client import Connection, code_of, encryption, make_client, status_of
from unicron_lib.adapters.s3_transfer import Place
from unicron_lib.checkpointing.store import Arrived, Transfer, ignore
from unicron_lib.errors import ObjectNotFound, StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONFLICT_ATTEMPTS = 8
"""A 409 says that another writer of the same key was at work; by the next attempt one of us has won."""
CONFLICT_WAIT_S = 0.05
SMALL_S = 100.0
"""How long a request may take that moves no large object: longer than boto3's own attempts together."""

T = TypeVar("T")


class S3Store:
    """Objects under `prefix` of `bucket`, by boto3; endpoint and credentials come from the AWS_* variables.

    Large ones go in parts of `part_bytes`, 5 MiB or more for S3 itself, and come in ranges of `range_bytes`.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        part_bytes: int = s3_transfer.PART_BYTES,
        range_bytes: int = s3_transfer.RANGE_BYTES,
        small_s: float = SMALL_S,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes
        self._range_bytes = range_bytes
        self._small_s = small_s
        self._writing = encryption()
        self._connection = Connection()
        self._large = Connection(attempts=1)

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".removesuffix("/")

    def get(self, key: str) -> bytes:
        """The object; raises ObjectNotFound."""
        where = self._place(key).where
        return self._ask(key, lambda client: client.get_object(**where)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite (up to 5 GB, S3's limit of one request); durable on return."""
        place = self._place(key)
        self._ask(key, lambda client: client.put_object(**place.where, Body=data, **place.writing))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write if there is nothing under `key`; False if there is, unless it is exactly `data`.

        boto3 repeats a request whose answer got lost, and then meets its own object: hence the comparison.
        """
        place = self._place(key)
        for attempt in range(CONFLICT_ATTEMPTS):
            status = self._ask(key, lambda client: _put_if_absent(client, place, data))
            if status == 200:
                return True
            if status == 412:
                return self.get(key) == data
            time.sleep(random.uniform(0.5, 1.5) * CONFLICT_WAIT_S * 2**attempt)  # noqa: S311 - jitter, no secret
        raise StoreError(f"{self.url}: other writers of {key!r} do not cease")

    def upload(self, key: str, data: memoryview, *, deadline_s: float) -> Transfer:
        """Write or overwrite a large object in parts; durable on return."""
        place = self._place(key)
        return self._explained(
            key, lambda: s3_transfer.upload(self._large, place, data, deadline_s=deadline_s, part_bytes=self._part_bytes)
        )

    def download(self, key: str, into: memoryview, *, deadline_s: float, arrived: Arrived = ignore) -> Transfer:
        """Fill `into` by ranged requests; raises ObjectNotFound, or StoreError if the object has another size."""
        place, range_bytes = self._place(key), self._range_bytes
        return self._explained(
            key,
            lambda: s3_transfer.download(
                self._large, place, into, deadline_s=deadline_s, arrived=arrived, range_bytes=range_bytes
            ),
        )

    def unfinished(self, prefix: str) -> list[str]:
        """Keys with that prefix that a multipart upload is open for."""
        return sorted({key for key, _ in self._open_uploads(prefix)})

    def give_up(self, key: str) -> None:
        """Abort the multipart uploads that are open for exactly this key."""
        place = self._place(key)
        for name, upload_id in self._open_uploads(key):
            if name == key:
                self._ask(key, partial(s3_transfer.abort, place=place, upload_id=upload_id))

    def size(self, key: str) -> int:
        """Bytes of the object; raises ObjectNotFound."""
        where = self._place(key).where
        return self._ask(key, lambda client: client.head_object(**where)["ContentLength"])

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        """Keys with that prefix in lexicographical order, only those after `start_after`."""
        return [*self._listed(prefix, start_after)]

    def sizes(self, prefix: str) -> dict[str, int]:
        """The keys of `list`, in its order, with the bytes of each object."""
        return self._listed(prefix)

    def _listed(self, prefix: str, start_after: str = "") -> dict[str, int]:
        first = f"{self._prefix}{start_after}" if start_after else ""
        whole = f"{self._prefix}{check_prefix(prefix)}"

        def found(client: "S3Client") -> list[tuple[str, int]]:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=whole, StartAfter=first)
            return [(item["Key"], item["Size"]) for page in pages for item in page.get("Contents", ())]

        # directory buckets (S3 Express) do not list in order
        return {name.removeprefix(self._prefix): size for name, size in sorted(self._ask(prefix, found))}

    def delete(self, key: str) -> None:
        """Remove; no error if it is not there."""
        where = self._place(key).where
        self._ask(key, lambda client: client.delete_object(**where))

    def check(self) -> None:
        """Raise StoreError when the bucket is not there or out of reach."""

        def is_there(client: "S3Client") -> bool:
            try:
                client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if status_of(error) != 404:
                    raise
                return False
            return True

        if not self._ask("the bucket", is_there):
            raise StoreError(f"there is no bucket {self._bucket!r}")

    def _open_uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        whole = f"{self._prefix}{check_prefix(prefix)}"

        def uploads(client: "S3Client") -> Sequence[tuple[str, str]]:
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=whole)
            return [(item["Key"], item["UploadId"]) for page in pages for item in page.get("Uploads", ())]

        return ((name.removeprefix(self._prefix), upload_id) for name, upload_id in self._ask(prefix, uploads))

    def _place(self, key: str) -> Place:
        return Place(self._bucket, f"{self._prefix}{check_key(key)}", self._writing)

    def _ask(self, key: str, call: "Callable[[S3Client], T]") -> T:
        limit = Limit(self._small_s, f"{self.url}: a request for {key!r}")
        return self._explained(key, lambda: in_time(limit, lambda: self._connection.ask(call)))

    def _explained(self, key: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except ClientError as error:
            if code_of(error) in {"NoSuchKey", "404"}:
                raise ObjectNotFound(f"{self.url} has no object {key!r}") from error
            raise StoreError(f"{self.url} refused {key!r}: {error}") from error
        except (BotoCoreError, OSError) as error:
            raise StoreError(f"{self.url} is out of reach: {error}") from error


def _put_if_absent(client: "S3Client", place: Place, data: bytes) -> int:
    """200, or 412 when there is something, or 409 when another writer is at it."""
    try:
        client.put_object(**place.where, Body=data, IfNoneMatch="*", **place.writing)
    except ClientError as error:
        if status_of(error) not in {409, 412}:
            raise
        return status_of(error)
    return 200


def make_bucket(bucket: str) -> None:
    """Create a bucket; no error if it is there and ours."""
    client = make_client()
    try:
        client.create_bucket(Bucket=bucket)
    except (client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        return
    except (ClientError, BotoCoreError, OSError) as error:
        raise StoreError(f"the bucket {bucket} cannot be created: {error}") from error
