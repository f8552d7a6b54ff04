"""boto3 as everybody uses it: what our own transfers are measured against. Nothing else calls this."""

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass

from boto3.s3.transfer import TransferConfig

from unicron_lib.adapters.s3_client import make_client

MIB = 1 << 20
SETTINGS = ((8, 10), (16, 8), (32, 4))
"""Megabytes of a part and number of threads; the first is boto3's default."""
SILENCE_S = 300.0
"""So slow may a busy local server be: boto3 does not survive that a slow last request is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to have boto3 transfer a file."""

    name: str
    config: TransferConfig


def settings() -> Iterator[Setting]:
    """Those that are tried."""
    for part_mib, num_threads in SETTINGS:
        part = part_mib * MIB
        config = TransferConfig(
            multipart_threshold=part, multipart_chunksize=part, max_concurrency=num_threads, preferred_transfer_client="classic"
        )
        yield Setting(name=f"{part_mib} MiB x {num_threads}", config=config)


class Yardstick:
    """Uploads and downloads one object of `bucket` by boto3's own transfer manager, which verifies nothing afterwards."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._client = make_client(silence_s=SILENCE_S)

    def upload(self, key: str, data: bytes | bytearray, setting: Setting) -> float:
        """Seconds."""
        started = time.perf_counter()
        self._client.upload_fileobj(io.BytesIO(data), self._bucket, key, Config=setting.config)
        return time.perf_counter() - started

    def download(self, key: str, setting: Setting) -> float:
        """Seconds."""
        started, into = time.perf_counter(), io.BytesIO()
        self._client.download_fileobj(self._bucket, key, into, Config=setting.config)
        return time.perf_counter() - started

    def delete(self, key: str) -> None:
        """Make room."""
        self._client.delete_object(Bucket=self._bucket, Key=key)
