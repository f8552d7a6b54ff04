"""Questions to an endpoint that speaks OpenAI's chat completions: bounded in time and in size, whatever it answers."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

MAX_REPLY_BYTES = 1 << 20
"""A longer answer is no answer."""
AT_ONCE = 4
"""Questions on their way at the same time: small servers reset connections when a few more wait to be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask: `url` is the base of the API. All answers have to be there within `timeout_s`."""

    url: str
    key: str = field(default="", repr=False)
    timeout_s: float = 60.0


def answers_to(question: Mapping[str, object], endpoint: Endpoint, *, times: int) -> tuple[str, ...]:
    """What the model says when it is asked so many times; an answer that does not come, or is none, is left out.

    To be called where no event loop runs.
    """
    return asyncio.run(_answers(question, endpoint, times))


async def _answers(question: Mapping[str, object], endpoint: Endpoint, times: int) -> tuple[str, ...]:
    headers = {"Accept-Encoding": "identity"}  # what unpacks to a gigabyte is not unpacked
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    limits = httpx.Limits(max_connections=AT_ONCE)
    until = asyncio.get_running_loop().time() + endpoint.timeout_s  # httpx's own timeouts begin anew with each byte
    async with httpx.AsyncClient(timeout=endpoint.timeout_s, headers=headers, limits=limits) as client:
        found = await asyncio.gather(*(_answer(client, question, endpoint.url, until) for _ in range(times)))
    return tuple(text for text in found if text is not None)


async def _answer(client: httpx.AsyncClient, question: Mapping[str, object], url: str, until: float) -> str | None:
    try:
        async with asyncio.timeout_at(until):
            reply = json.loads(await _body(client, question, url))
        content = reply["choices"][0]["message"]["content"]
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return content if isinstance(content, str) else None


async def _body(client: httpx.AsyncClient, question: Mapping[str, object], url: str) -> bytes:
    """Raises httpx.HTTPError, and ValueError for more than MAX_REPLY_BYTES."""
    body = bytearray()
    async with client.stream("POST", f"{url}/chat/completions", json=question) as reply:
        reply.raise_for_status()
        async for part in reply.aiter_raw():
            body += part
            if len(body) > MAX_REPLY_BYTES:
                raise ValueError(f"the answer has more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)
