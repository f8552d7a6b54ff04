"""What EC2 tells an instance about its own end: the instance metadata service, version 2."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Annotated, TypeVar

import httpx
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from unicron_lib.errors import MetadataError

T = TypeVar("T")
CALL_S = 2.0
TOKEN_TTL_S = 21600
"""The longest that the service allows; it says so when a token is over."""
ENDINGS = frozenset({"instance-reboot", "system-reboot", "instance-stop", "instance-retirement"})
"""Codes of scheduled events that end whatever runs on the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The instance's end: `what` completes the sentence "the node leaves: ...", `at` is when (epoch s)."""

    what: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action:
    action: str
    time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduled:
    """Times are written as in mail: `21 Jan 2019 09:00:43 GMT`."""

    begins: Annotated[datetime, BeforeValidator(lambda told: parsedate_to_datetime(str(told))), Field(alias="NotBefore")]
    code: Annotated[str, Field(alias="Code")]
    text: Annotated[str, Field(alias="Description")] = ""
    state: Annotated[str, Field(alias="State")] = "active"


_action = TypeAdapter(_Action)
_scheduled = TypeAdapter(tuple[_Scheduled, ...])


class InstanceMetadata:
    """The service at `endpoint`, `http://HOST`; it is asked directly, whatever proxies the environment names."""

    def __init__(self, endpoint: str) -> None:
        self._client = httpx.AsyncClient(base_url=endpoint, trust_env=False, timeout=CALL_S)
        self._token = ""

    async def close(self) -> None:
        """End the connection."""
        await self._client.aclose()

    async def interruption(self) -> Notice | None:
        """The notice that a spot instance gets about two minutes ahead, None if there is none. Raises MetadataError."""
        body = await self._read("/latest/meta-data/spot/instance-action")
        if body is None:
            return None
        told = _understood(_action, body)
        return Notice(what=f"a spot interruption notice says {told.action}", at=_epoch(told.time))

    async def scheduled(self) -> tuple[Notice, ...]:
        """The ends that are scheduled, days ahead mostly. Raises MetadataError."""
        body = await self._read("/latest/meta-data/events/maintenance/scheduled")
        events = _understood(_scheduled, body) if body is not None else ()
        return tuple(
            Notice(what=f"EC2 has scheduled {it.code} ({it.text})", at=_epoch(it.begins))
            for it in events
            if it.code in ENDINGS and it.state == "active"
        )

    async def _read(self, path: str) -> bytes | None:
        """The document, None where there is none; within `CALL_S` in all, whatever the service does."""
        try:
            async with asyncio.timeout(CALL_S):
                answer = await self._get(path)
                if answer.status_code == HTTPStatus.UNAUTHORIZED:
                    self._token = ""
                    answer = await self._get(path)
        except TimeoutError:
            raise MetadataError(f"the instance metadata service has not answered within {CALL_S:g} s") from None
        except httpx.HTTPError as error:
            raise MetadataError(f"the instance metadata service is out of reach: {error or type(error).__name__}") from None
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None
        return _content(answer, path)

    async def _get(self, path: str) -> httpx.Response:
        if not self._token:
            wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            given = await self._client.put("/latest/api/token", headers=wanted)
            self._token = _content(given, "a token").decode("ascii", errors="replace").strip()
        return await self._client.get(path, headers={"X-aws-ec2-metadata-token": self._token})


def _content(answer: httpx.Response, what: str) -> bytes:
    if answer.status_code != HTTPStatus.OK:
        raise MetadataError(f"the instance metadata service answers {answer.status_code} when it is asked for {what}")
    return answer.content


def _understood(adapter: TypeAdapter[T], body: bytes) -> T:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise MetadataError(f"the instance metadata service says something unknown: {body[:200]!r}") from error


def _epoch(time: datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
