"""The controller as flows and the command line see it."""

import ssl
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from unicron_lib.agent.access import bearer
from unicron_lib.agent.messages import Command, Observation, Reply, command
from unicron_lib.controller.views import (
    Health,
    JobProgress,
    NodeView,
    acknowledged_json,
    all_progress_json,
    health_json,
    nodes_json,
    observations_json,
    progress_json,
    watchers_json,
)
from unicron_lib.errors import CommandTimeout, ControllerError, NodeNotConnected

T = TypeVar("T")
ANSWER_S = 5.0
_ERRORS: dict[int, type[ControllerError]] = {
    httpx.codes.NOT_FOUND: NodeNotConnected,
    httpx.codes.GATEWAY_TIMEOUT: CommandTimeout,
}
_reply: TypeAdapter[Reply] = TypeAdapter(Reply)


class ControllerClient:
    """Calls the controller at `url` (`http://host:port`). All methods raise ControllerError with one clear sentence.

    With `https://` the controller's certificate must be signed by a CA of the system, or by the one in SSL_CERT_FILE.
    `async with` closes its connections. One client belongs to one event loop.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        trust = ssl.create_default_context()
        self._http = httpx.AsyncClient(
            base_url=self._url, headers=bearer(token), timeout=ANSWER_S, trust_env=False, verify=trust
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def health(self) -> Health:
        """How the controller is; needs no token."""
        return _parse(health_json, await self._call("GET", "/v1/health"))

    async def nodes(self) -> tuple[NodeView, ...]:
        """All nodes that the controller knows, by name."""
        return _parse(nodes_json, await self._call("GET", "/v1/nodes"))

    async def progress(self) -> tuple[JobProgress, ...]:
        """How far each job is."""
        return _parse(all_progress_json, await self._call("GET", "/v1/progress"))

    async def job_progress(
        self, job: str, *, generation: int = 0, world_size: int | None = None, wait_s: float = 0.0
    ) -> JobProgress | None:
        """How far `job` is, None if it has never reported.

        Waits up to `wait_s` (60 at most) for an iteration of every rank of `generation` or a later one: ask
        `has_stepped(generation, world_size)` of the answer.
        """
        query = {"generation": generation, "world_size": world_size, "wait_s": wait_s}
        response = await self._call("GET", f"/v1/progress/{job}", query=query, wait_s=wait_s, missing_is_fine=True)
        return None if response.status_code == httpx.codes.NOT_FOUND else _parse(progress_json, response)

    async def observations(
        self, *, job: str | None = None, wait_s: float = 0.0, min_age_s: float = 0.0
    ) -> tuple[Observation, ...]:
        """Observations that are not acknowledged yet; waits up to `wait_s` (60 at most) for one.

        A few dozen at most, oldest first of each agent, the agents in turn: acknowledge them and ask for the next ones.
        With `job` those of the job and of lost nodes that ran ranks of it; only those that wait for `min_age_s`.
        """
        query = {"job": job, "wait_s": wait_s, "min_age_s": min_age_s}
        return _parse(observations_json, await self._call("GET", "/v1/observations", query=query, wait_s=wait_s))

    async def watchers(self) -> dict[str, float]:
        """Seconds since somebody last waited for the observations of a job, by job."""
        return _parse(watchers_json, await self._call("GET", "/v1/watchers"))

    async def acknowledge(self, ids: Iterable[str]) -> int:
        """The observations are journalled: forget them. How many of them were waiting."""
        answer = await self._call("POST", "/v1/observations/ack", json={"ids": list(ids)})
        return _parse(acknowledged_json, answer).acknowledged

    async def acknowledged(self, told: int = -1, *, wait_s: float = 0.0) -> int:
        """How many observations were acknowledged in this controller's life; waits up to `wait_s` (60 at most) while `told`."""
        query = {"told": told, "wait_s": wait_s}
        answer = await self._call("GET", "/v1/observations/acknowledged", query=query, wait_s=wait_s)
        return _parse(acknowledged_json, answer).acknowledged

    async def command(self, node: str, wanted: Command, *, timeout_s: float = 30.0) -> Reply:
        """Have the agent of `node` carry out a command. After an error the same command may be sent again.

        Raises NodeNotConnected if the node has no connection, CommandTimeout if it does not answer. A refusal
        by the agent is a Reply with `ok` False.
        """
        answer = await self._call(
            "POST",
            f"/v1/nodes/{node}/commands",
            query={"timeout_s": timeout_s},
            content=command.dump_json(wanted),
            wait_s=timeout_s,
        )
        return _parse(_reply, answer)

    async def _call(  # private, and each one is named
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        json: object = None,
        content: bytes | None = None,
        wait_s: float = 0.0,
        missing_is_fine: bool = False,
    ) -> httpx.Response:
        params = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            response = await self._http.request(
                method, path, params=params, json=json, content=content, timeout=ANSWER_S + wait_s
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ControllerError(f"the controller at {self._url} does not answer ({reason}): is it running?") from error
        if response.is_success or (response.status_code == httpx.codes.NOT_FOUND and missing_is_fine):
            return response
        raise _ERRORS.get(response.status_code, ControllerError)(_detail(response))


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the controller answered {response.status_code} to {response.request.url}"


def _parse(adapter: TypeAdapter[T], response: httpx.Response) -> T:
    try:
        return adapter.validate_json(response.content)
    except ValidationError as error:
        raise ControllerError(f"the controller answered something unknown to {response.request.url}: {error}") from error
