"""Large objects to and from S3: in parts, several at a time, each repeated by itself, all within one deadline."""

import base64
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awscrt.checksums import crc32c  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError

from unicron_lib.adapters.limits import Limit, in_parallel, in_time
from unicron_lib.adapters.s3_client import Connection, code_of
from unicron_lib.checkpointing.store import Arrived, Transfer
from unicron_lib.errors import StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

PART_BYTES = 8 << 20
RANGE_BYTES = 64 << 20
"""What is asked for at a time: it is read into its place, so that it costs no memory, nor is any of it asked for twice."""
MAX_PARTS = 9000
"""S3 takes 10,000."""
NUM_THREADS = 10
PIECE_BYTES = 1 << 20
GIVING_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """One object of a bucket. `writing` is what every write carries, such as the encryption wanted."""

    bucket: str
    name: str
    writing: dict[str, Any]

    @property
    def where(self) -> dict[str, Any]:
        """The object, as boto3's arguments."""
        return {"Bucket": self.bucket, "Key": self.name}


class _Counted:
    """How many requests moved data."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.attempts = 0

    def one(self) -> None:
        with self._lock:
            self.attempts += 1


def spans(num_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of the parts, of `part_bytes` or more where there would be too many."""
    size = max(part_bytes, -(-num_bytes // MAX_PARTS))
    return [(begin, min(begin + size, num_bytes)) for begin in range(0, num_bytes, size)] or [(0, 0)]


def upload(
    connection: Connection, place: Place, data: memoryview, *, deadline_s: float, part_bytes: int = PART_BYTES
) -> Transfer:
    """Write an object, by multipart upload above the size of a part. Memory: a part for each of the threads."""
    limit, counted, started = Limit(deadline_s, f"the upload of {place.name!r}"), _Counted(), time.monotonic()
    parts = spans(data.nbytes, part_bytes)
    if len(parts) > 1:
        _Multipart(connection, place, data, counted).send(limit, parts)
    else:
        body = bytes(data)
        in_time(limit, lambda: connection.insist(limit, lambda client: _put(client, place, body, counted)))
    elapsed_s = time.monotonic() - started
    return Transfer(num_bytes=data.nbytes, elapsed_s=elapsed_s, parts=len(parts), attempts=counted.attempts)


def _put(client: "S3Client", place: Place, body: bytes, counted: _Counted) -> None:
    counted.one()
    client.put_object(**place.where, Body=body, ChecksumCRC32C=_checksum(body), **place.writing)


class _Multipart:
    """One multipart upload; its parts carry a CRC32C each, which S3 verifies on arrival."""

    def __init__(self, connection: Connection, place: Place, data: memoryview, counted: _Counted) -> None:
        self._connection = connection
        self._place = place
        self._data = data
        self._counted = counted
        self._mark = uuid.uuid4().hex
        self._id = ""

    def send(self, limit: Limit, parts: Sequence[tuple[int, int]]) -> None:
        try:
            in_time(limit, lambda: self._connection.insist(limit, self._begin))
            calls = [self._sending(limit, number, span) for number, span in enumerate(parts, 1)]
            done = sorted(in_parallel(limit, calls, num_threads=NUM_THREADS), key=lambda part: part["PartNumber"])
            in_time(limit, lambda: self._connection.insist(limit, lambda client: self._complete(client, done)))
        except BaseException:
            limit.over.set()
            self._abort()
            raise

    def _begin(self, client: "S3Client") -> None:
        response = client.create_multipart_upload(
            **self._place.where, ChecksumAlgorithm="CRC32C", Metadata={"unicron-upload": self._mark}, **self._place.writing
        )
        self._id = response["UploadId"]

    def _sending(self, limit: Limit, number: int, span: tuple[int, int]) -> Callable[[], dict[str, Any]]:
        def send() -> dict[str, Any]:
            body = bytes(self._data[slice(*span)])
            checksum = _checksum(body)

            def once(client: "S3Client") -> str:
                self._counted.one()
                response = client.upload_part(
                    **self._place.where, UploadId=self._id, PartNumber=number, Body=body, ChecksumCRC32C=checksum
                )
                return response["ETag"]

            etag = self._connection.insist(limit, once)
            return {"PartNumber": number, "ETag": etag, "ChecksumCRC32C": checksum}

        return send

    def _complete(self, client: "S3Client", parts: list[dict[str, Any]]) -> None:
        try:
            client.complete_multipart_upload(
                **self._place.where,
                UploadId=self._id,
                MultipartUpload={"Parts": parts},  # type: ignore[typeddict-item]
            )
        except ClientError as error:
            # an answer that got lost: the upload is no more, for it has become the object
            if code_of(error) != "NoSuchUpload" or not self._is_there(client):
                raise

    def _is_there(self, client: "S3Client") -> bool:
        head = client.head_object(**self._place.where)
        return head["ContentLength"] == self._data.nbytes and head["Metadata"].get("unicron-upload") == self._mark

    def _abort(self) -> None:
        """Best effort: what stays is found by the collector, or by the bucket's lifecycle rule."""
        if not self._id:
            return
        try:
            limit = Limit(GIVING_UP_S, "giving up an upload")
            in_time(limit, lambda: abort(self._connection.client, self._place, self._id))
        except (ClientError, BotoCoreError, OSError, StoreError):
            pass


def abort(client: "S3Client", place: Place, upload_id: str) -> None:
    """Remove the parts of an unfinished upload; no error if there is none."""
    try:
        client.abort_multipart_upload(**place.where, UploadId=upload_id)
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":
            raise


def download(
    connection: Connection,
    place: Place,
    into: memoryview,
    *,
    deadline_s: float,
    arrived: Arrived,
    range_bytes: int = RANGE_BYTES,
) -> Transfer:
    """Fill `into` by ranged requests; a body that is cut is gone on with where it ended."""
    limit, counted, started = Limit(deadline_s, f"the download of {place.name!r}"), _Counted(), time.monotonic()
    parts = spans(into.nbytes, range_bytes)
    calls = [_Range(connection, place, into, span, counted).fetcher(limit) for span in parts]
    there, ahead = 0, dict[int, int]()
    for begin, end in in_parallel(limit, calls, num_threads=NUM_THREADS):
        ahead[begin] = end
        while there in ahead and ahead[there] > there:
            there = ahead.pop(there)
            arrived(there)
    elapsed_s = time.monotonic() - started
    return Transfer(num_bytes=into.nbytes, elapsed_s=elapsed_s, parts=len(parts), attempts=counted.attempts)


class _Range:
    """One range of an object; what has arrived of it is not asked for again."""

    def __init__(
        self, connection: Connection, place: Place, into: memoryview, span: tuple[int, int], counted: _Counted
    ) -> None:
        self._connection = connection
        self._place = place
        self._into = into
        self._begin, self._end = span
        self._at = span[0]
        self._counted = counted

    def fetcher(self, limit: Limit) -> Callable[[], tuple[int, int]]:
        def fetch() -> tuple[int, int]:
            self._connection.insist(limit, self._once)
            return self._begin, self._end

        return fetch

    def _once(self, client: "S3Client") -> None:
        self._counted.one()
        if not self._into.nbytes:
            self._refuse_other_size(client.head_object(**self._place.where)["ContentLength"])
            return
        try:
            response = client.get_object(**self._place.where, Range=f"bytes={self._at}-{self._end - 1}")
        except ClientError as error:
            if code_of(error) == "InvalidRange":
                raise self._other_size() from error
            raise
        with response["Body"] as body:
            self._refuse_other_size(_size_of(response))
            while self._at < self._end:
                piece: Any = self._into[self._at : min(self._end, self._at + PIECE_BYTES)]  # boto3's stubs want a file
                num_bytes = body.readinto(piece)
                if not num_bytes:
                    raise ConnectionError("the body ended early")
                self._at += num_bytes

    def _refuse_other_size(self, num_bytes: int) -> None:
        if num_bytes != self._into.nbytes:
            raise self._other_size()

    def _other_size(self) -> StoreError:
        return StoreError(f"{self._place.name!r} does not have {self._into.nbytes} bytes")


def _size_of(response: Any) -> int:
    """Bytes of the whole object that an answer holds a range of; -1 if it does not say, or is no answer to a range."""
    total: str = response.get("ContentRange", "").rpartition("/")[2]
    return int(total) if total.isdigit() else -1


def _checksum(body: bytes) -> str:
    return base64.b64encode(crc32c(body).to_bytes(4, "big")).decode()
