"""The S3 client: endpoint, credentials and encryption by the environment, and what to do when credentials run out."""

import logging
import os
import random
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)
from botocore.loaders import Loader, create_loader

from unicron_lib.adapters.limits import Limit
from unicron_lib.errors import UserError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
REPLACED = frozenset({"InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"})
"""The keys may have been rotated: what was asked is refused, but the next request goes with what the chain has then."""
PASSING = frozenset({"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "InternalError", "BadDigest", "Throttling"})
"""Codes that another attempt may cure, beside all of 5xx and 429; BadDigest is what a bit that flipped on its way gives."""
FOR_GOOD = (SSLError, NoCredentialsError, PartialCredentialsError, ParamValidationError)
REFUSALS = 5
"""A server that refuses connections is down, unlike one that answers slowly: after so many in a row it is given up."""
BACK_OFF_S = (0.1, 5.0)
SSE = ("AES256", "aws:kms", "aws:kms:dsse")

T = TypeVar("T")
log = logging.getLogger(__name__)


def make_client(*, attempts: int = 4, silence_s: float = 20) -> "S3Client":
    """A client that gives up on a dead server after some `silence_s` an attempt; safe to share between threads."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=3,
        read_timeout=silence_s,
        tcp_keepalive=True,
        max_pool_connections=16,
        # other servers store the framing of boto3's trailing checksums as data, or refuse it
        request_checksum_calculation="when_required" if endpoint else "when_supported",
        response_checksum_validation="when_required" if endpoint else "when_supported",
    )
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    session = botocore.session.Session()
    session.register_component("data_loader", known())
    client = boto3.session.Session(botocore_session=session, region_name=region).client("s3", config=config)
    known().search_paths[:] = dict.fromkeys(known().search_paths)  # each session of boto3's adds its own directory
    return client


@cache
def known() -> Loader:
    """What boto3 knows of S3, which is in large files: read once for all clients of a process."""
    return create_loader(botocore.session.Session().get_config_variable("data_path"))


def learn() -> None:
    """Read what clients need to know, so that processes forked from this one need not."""
    known().load_data("endpoints")
    for kind in ("service-2", "endpoint-rule-set-1"):
        known().load_service_model("s3", kind)


def encryption(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What writes carry so that the server encrypts, by UNICRON_S3_SSE and UNICRON_S3_SSE_KMS_KEY_ID.

    Nothing if they are not set: the bucket's own default counts. Raises UserError for a kind that S3 does not know.
    """
    kind, key = env.get("UNICRON_S3_SSE", ""), env.get("UNICRON_S3_SSE_KMS_KEY_ID", "")
    if kind and kind not in SSE:
        raise UserError(f"UNICRON_S3_SSE is {kind[:40]!r}: S3 knows {', '.join(SSE)}")
    if key and not kind.startswith("aws:kms"):
        raise UserError("UNICRON_S3_SSE_KMS_KEY_ID is set: UNICRON_S3_SSE must then be aws:kms")
    return ({"ServerSideEncryption": kind} if kind else {}) | ({"SSEKMSKeyId": key} if key else {})


class Connection:
    """The client that requests go through. Credentials are read anew, by the standard chain, once they have expired.

    `attempts` is how often the client itself repeats a request.
    """

    def __init__(self, *, attempts: int = 4) -> None:
        self._attempts = attempts
        self._lock = threading.Lock()
        self._client: S3Client | None = None

    @property
    def client(self) -> "S3Client":
        """The client as of now; made when it is first needed, for that takes a tenth of a second."""
        with self._lock:
            if self._client is None:
                self._client = make_client(attempts=self._attempts)
            return self._client

    def renew(self, expired: "S3Client") -> None:
        """Replace the client unless another thread has done so."""
        with self._lock:
            if self._client is expired:
                log.warning("the store's credentials have expired: they are read anew, and the request is repeated")
                self._client = make_client(attempts=self._attempts)

    def _forget(self, client: "S3Client", error: Exception) -> None:
        with self._lock:
            if self._client is client and isinstance(error, ClientError) and code_of(error) in REPLACED:
                self._client = None

    def ask(self, call: "Callable[[S3Client], T]") -> T:
        """What `call` returns; once more with new credentials if they have expired."""
        client = self.client
        try:
            return call(client)
        except ClientError as error:
            self._forget(client, error)
            if code_of(error) not in EXPIRED:
                raise
        self.renew(client)
        return call(self.client)

    def insist(self, limit: Limit, call: "Callable[[S3Client], T]") -> T:
        """What `call` returns, repeated with growing, jittered pauses while what fails may pass and time is left."""
        back_off_s, refusals = BACK_OFF_S[0], 0
        while True:
            client = self.client
            try:
                return call(client)
            except (ClientError, BotoCoreError, OSError) as error:
                self._forget(client, error)
                refusals = refusals + 1 if isinstance(error, EndpointConnectionError) else 0
                pause_s = random.uniform(0.5, 1.5) * back_off_s  # noqa: S311 - jitter, no secret
                if not may_pass(error) or refusals >= REFUSALS or pause_s >= limit.left_s:
                    raise
                if isinstance(error, ClientError) and code_of(error) in EXPIRED:
                    self.renew(client)
                else:
                    log.info("the store: %s; trying again", error)
            limit.pause(pause_s)
            back_off_s = min(2 * back_off_s, BACK_OFF_S[1])


def may_pass(error: Exception) -> bool:
    """Whether the same request may work in a moment."""
    if isinstance(error, ClientError):
        status = status_of(error)
        return status >= 500 or status == 429 or code_of(error) in PASSING | EXPIRED
    return not isinstance(error, FOR_GOOD)


def code_of(error: ClientError) -> str:
    """S3's word for what went wrong."""
    return error.response.get("Error", {}).get("Code", "")


def status_of(error: ClientError) -> int:
    """The HTTP status."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
