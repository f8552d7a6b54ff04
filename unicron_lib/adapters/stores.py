"""From a URL to its object store."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from unicron_lib.adapters.files import FileStore
from unicron_lib.adapters.keys import check_prefix
from unicron_lib.checkpointing.store import ObjectStore
from unicron_lib.errors import StoreError, UserError

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def open_store(url: str) -> ObjectStore:
    """The store of `s3://bucket/prefix` or `file:///dir`, not contacted yet; raises UserError for any other URL."""
    parts = urlsplit(url)
    match parts.scheme:
        case "file" if parts.netloc in {"", "localhost"} and len(parts.path) > 1:
            return FileStore(Path(unquote(parts.path)))
        case "s3" if BUCKET.fullmatch(parts.netloc):
            return _s3(url, parts.netloc, parts.path.strip("/"))
    raise UserError(f"{url!r} is no object store: give file:///an/absolute/directory or s3://bucket/prefix")


def create_store(url: str) -> None:
    """Make the bucket or the directory exist; raises StoreError when the server is out of reach or refuses."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        Path(unquote(parts.path)).mkdir(parents=True, exist_ok=True)
        return
    from unicron_lib.adapters.s3 import make_bucket

    make_bucket(parts.netloc)


def check_store(store: ObjectStore) -> None:
    """Raise StoreError, one sentence with what to do, when the store is out of reach or cannot be written."""
    check = getattr(store, "check", None)
    try:
        if check is not None:
            check()
        else:
            store.list("probe")
    except StoreError as error:
        on_files = store.url.startswith("file:")
        advice = "check the directory" if on_files else "check the bucket's name, AWS_ENDPOINT_URL and the credentials"
        raise StoreError(f"the object store cannot be used: {error}; {advice}") from error


def _s3(url: str, bucket: str, prefix: str) -> ObjectStore:
    try:
        check_prefix(prefix)
    except ValueError as error:
        raise UserError(f"{url!r} is no object store: {error}") from error
    from unicron_lib.adapters.s3 import S3Store  # boto3 takes half a second that a file:// store need not pay

    return S3Store(bucket, prefix)
