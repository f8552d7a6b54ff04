"""An object store on S3 or a server that speaks its protocol. The only module that imports boto3 and botocore."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from unicron_lib.adapters.keys import check_key, check_prefix
from unicron_lib.errors import ObjectNotFound, StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONFLICT_ATTEMPTS = 8
"""A 409 says that another writer of the same key was at work; by the next attempt one of us has won."""
CONFLICT_WAIT_S = 0.05


class S3Store:
    """Objects under `prefix` of `bucket`, by boto3; endpoint and credentials come from the AWS_* variables."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = make_client()

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return f"s3://{self._bucket}/{self._prefix}".removesuffix("/")

    def get(self, key: str) -> bytes:
        """The object; raises ObjectNotFound."""
        with self._explained(key):
            return self._client.get_object(Bucket=self._bucket, Key=self._name(key))["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite (up to 5 GB, S3's limit of one request); durable on return."""
        with self._explained(key):
            self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write if there is nothing under `key`; False if there is, unless it is exactly `data`.

        boto3 repeats a request whose answer got lost, and then meets its own object: hence the comparison.
        """
        for attempt in range(CONFLICT_ATTEMPTS):
            with self._explained(key):
                try:
                    self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=data, IfNoneMatch="*")
                except ClientError as error:
                    if _status(error) == 412:
                        return self.get(key) == data
                    if _status(error) != 409 or attempt == CONFLICT_ATTEMPTS - 1:
                        raise
                else:
                    return True
            time.sleep(random.uniform(0.5, 1.5) * CONFLICT_WAIT_S * 2**attempt)  # noqa: S311 - jitter, no secret
        raise AssertionError("the last attempt returns or raises")

    def size(self, key: str) -> int:
        """Bytes of the object; raises ObjectNotFound."""
        with self._explained(key):
            return self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ContentLength"]

    def list(self, prefix: str, *, start_after: str = "") -> list[str]:
        """Keys with that prefix in lexicographical order, only those after `start_after`."""
        first = f"{self._prefix}{start_after}" if start_after else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{check_prefix(prefix)}", StartAfter=first
        )
        with self._explained(prefix):
            names = [item["Key"] for page in pages for item in page.get("Contents", ())]
        # directory buckets (S3 Express) do not list in order
        return sorted(name.removeprefix(self._prefix) for name in names)

    def delete(self, key: str) -> None:
        """Remove; no error if it is not there."""
        with self._explained(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def check(self) -> None:
        """Raise StoreError when the bucket is not there or out of reach."""
        with self._explained("the bucket"):
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _status(error) != 404:
                    raise
                raise StoreError(f"there is no bucket {self._bucket!r}") from error

    def _name(self, key: str) -> str:
        return f"{self._prefix}{check_key(key)}"

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in {"NoSuchKey", "404"}:
                raise ObjectNotFound(f"{self.url} has no object {key!r}") from error
            raise StoreError(f"{self.url} refused {key!r}: {error}") from error
        except (BotoCoreError, OSError) as error:
            raise StoreError(f"{self.url} is out of reach: {error}") from error


def make_bucket(bucket: str) -> None:
    """Create a bucket; no error if it is there and ours."""
    client = make_client()
    try:
        client.create_bucket(Bucket=bucket)
    except (client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        return
    except (ClientError, BotoCoreError, OSError) as error:
        raise StoreError(f"the bucket {bucket} cannot be created: {error}") from error


def make_client() -> "S3Client":
    """A client that gives up on a dead server after some 20 s; safe to share between threads."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 4},
        connect_timeout=3,
        read_timeout=20,
        tcp_keepalive=True,
        max_pool_connections=16,
        # other servers store the framing of boto3's trailing checksums as data, or refuse it
        request_checksum_calculation="when_required" if endpoint else "when_supported",
        response_checksum_validation="when_required" if endpoint else "when_supported",
    )
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return boto3.session.Session(region_name=region).client("s3", config=config)


def _status(error: ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
