"""The controller as an application: its HTTP interface and what runs in the background."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from pydantic import TypeAdapter, ValidationError

from unicron_lib.agent.access import is_admitted
from unicron_lib.agent.messages import Observation, Reply, command
from unicron_lib.controller.agents import serve_agent
from unicron_lib.controller.recorder import JournalPort, Recorder
from unicron_lib.controller.service import SNOOZE_S, Controller
from unicron_lib.controller.sight import BLIND_S
from unicron_lib.controller.views import (
    Acknowledged,
    Health,
    acknowledged_json,
    all_progress_json,
    health_json,
    nodes_json,
    observations_json,
    progress_json,
    watchers_json,
)
from unicron_lib.controller.watch import view, watch
from unicron_lib.domain.cluster import ClusterState
from unicron_lib.errors import CommandTimeout, ControllerError, NodeNotConnected

LONGEST_WAIT_S = 60.0
LONGEST_COMMAND_S = 3600.0
WaitS = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S)]
_reply: TypeAdapter[Reply] = TypeAdapter(Reply)


def create_app(
    *, journal: JournalPort, token: str, known: ClusterState, snooze_s: float = SNOOZE_S, blind_s: float = BLIND_S
) -> FastAPI:
    """The application; `known` is the journal's state at the start, `snooze_s` and `blind_s` are as in `Controller`."""
    controller = Controller(Recorder(journal), snooze_s=snooze_s, blind_s=blind_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        controller.remember(known)
        background = [asyncio.create_task(controller.recorder.run()), asyncio.create_task(watch(controller))]
        yield
        for task in background:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = FastAPI(title="Unicron controller", lifespan=lifespan, openapi_url=None)
    app.state.controller = controller

    async def check_token(request: Request) -> None:
        if not is_admitted(request.headers.get("authorization"), token):
            raise HTTPException(401, "wrong token: use the token file of the controller")

    @app.get("/v1/health")
    async def health() -> Response:
        error = controller.recorder.error
        return _json(health_json, Health(ok=not error, num_nodes=len(controller.hub.nodes), journal_error=error))

    @app.websocket("/v1/agents")
    async def agents(socket: WebSocket) -> None:
        await serve_agent(controller, token, socket)

    for router in (_routes(controller), _observation_routes(controller)):
        app.include_router(router, prefix="/v1", dependencies=[Depends(check_token)])
    app.add_exception_handler(ControllerError, _refuse)
    return app


def _routes(controller: Controller) -> APIRouter:
    router = APIRouter()

    @router.get("/nodes")
    async def nodes() -> Response:
        records = sorted(controller.hub.nodes.values(), key=lambda record: record.hello.node)
        return _json(nodes_json, tuple(view(controller, record) for record in records))

    @router.get("/progress")
    async def progress() -> Response:
        return _json(all_progress_json, controller.progress.views())

    @router.get("/progress/{job}")
    async def job_progress(job: str, generation: int = 0, world_size: int | None = None, wait_s: WaitS = 0.0) -> Response:
        def stepped() -> bool:
            seen = controller.progress.view(job)
            return seen is not None and seen.has_stepped(generation, world_size)

        await controller.bell.until(stepped, timeout_s=wait_s)
        seen = controller.progress.view(job)
        if seen is None:
            raise HTTPException(404, f"job {job} has not reported any progress")
        return _json(progress_json, seen)

    @router.post("/nodes/{node}/commands")
    async def send(
        node: str, request: Request, timeout_s: Annotated[float, Query(gt=0, le=LONGEST_COMMAND_S)] = 30.0
    ) -> Response:
        try:
            wanted = command.validate_json(await request.body())
        except ValidationError as error:
            raise HTTPException(422, f"that is no command: {error}") from None
        return _json(_reply, await controller.hub.command(node, wanted, timeout_s=timeout_s))

    return router


def _observation_routes(controller: Controller) -> APIRouter:
    router = APIRouter()

    @router.get("/observations")
    async def observations(job: str | None = None, wait_s: WaitS = 0.0, min_age_s: WaitS = 0.0) -> Response:
        try:
            found = await _await_observations(controller, job, wait_s=wait_s, min_age_s=min_age_s)
        finally:
            if job is not None:
                controller.watched_at[job] = time.monotonic()
        return _json(observations_json, found)

    @router.get("/watchers")
    async def watchers() -> Response:
        now = time.monotonic()
        return _json(watchers_json, {job: now - at for job, at in controller.watched_at.items()})

    @router.get("/observations/acknowledged")
    async def acknowledged(told: int = -1, wait_s: WaitS = 0.0) -> Response:
        await controller.bell.until(lambda: controller.num_acknowledged != told, timeout_s=wait_s)
        return _json(acknowledged_json, Acknowledged(acknowledged=controller.num_acknowledged))

    @router.post("/observations/ack")
    async def acknowledge(ids: Annotated[list[str], Body(embed=True)]) -> Response:
        return _json(acknowledged_json, Acknowledged(acknowledged=await controller.acknowledge(ids)))

    return router


async def _await_observations(
    controller: Controller, job: str | None, *, wait_s: float, min_age_s: float
) -> tuple[Observation, ...]:
    """What waits, as soon as there is something, at the latest after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        now = time.monotonic()
        found = controller.pending.select(now=now, job=job, min_age_s=min_age_s)
        if found or now >= deadline:
            return found
        due_s = controller.pending.next_due_s(now=now, min_age_s=min_age_s)
        pause_s = min(deadline - now, due_s if due_s is not None else LONGEST_WAIT_S)
        await controller.bell.until(
            lambda: bool(controller.pending.select(now=time.monotonic(), job=job, min_age_s=min_age_s)),
            timeout_s=pause_s,
        )


def _json(adapter: TypeAdapter[Any], value: object) -> Response:
    return Response(adapter.dump_json(value), media_type="application/json")


async def _refuse(_: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, NodeNotConnected) else 504 if isinstance(error, CommandTimeout) else 502
    return JSONResponse({"detail": str(error)}, status_code=status)
