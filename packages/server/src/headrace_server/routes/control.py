"""Control of the running engine: pause, cache reset, profile; and routes for development.

Not a plug-in: these are added by the application where the operator switched them on, on the public
port or on the admin port, and always behind the key (:mod:`headrace_server.security.auth`, ADR 0028).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pprint
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from headrace_core.engine import EngineClient
from headrace_core.errors import CapacityError, ModelError, RequestError, UnsupportedFeature
from headrace_server.api_processes import all_processes
from headrace_server.errors.mapping import ErrorAnswer, ErrorResponse, report_named
from headrace_server.http.routing import ERROR_RESPONSES, json_router
from headrace_server.routes import elastic, lora, weight_swaps, weight_updates
from headrace_server.routes.named import check_named
from headrace_server.routes.query import check_query
from headrace_server.settings import ServerSettings
from headrace_server.state import state_of
from headrace_server.streaming.event_stream import wait_watching

NOT_SERVED: Mapping[str, tuple[str, str]] = {
    "/reset_mm_cache": ("POST", "this engine has no cache of media"),
}
"""Routes that clients know and nothing here can serve: they say so by name."""
WAKING_TIMEOUT = 3600.0
"""Longest wait for an engine that falls asleep or wakes up, in seconds: it may read a large checkpoint."""
RPC_TIMEOUT = 600.0
"""Longest ``timeout`` of a remote call, in seconds."""
NAMED = (ModelError, CapacityError)
"""Weights or memory that could not be had: the caller is told why."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_EMPTY: dict[int | str, dict[str, Any]] = {**ERROR_RESPONSES, 200: {"content": {}}}


class Paused(BaseModel):
    """Answer of ``GET /is_paused``."""

    is_paused: bool


class Sleeping(BaseModel):
    """Answer of ``GET /is_sleeping``."""

    is_sleeping: bool
    """True until every part is awake."""


class WorkerCall(BaseModel):
    """Body of ``POST /collective_rpc``."""

    model_config = ConfigDict(extra="forbid")

    method: Annotated[str, Field(max_length=64)]
    args: Annotated[list[Any], Field(max_length=16)] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float | None, Field(gt=0, le=RPC_TIMEOUT)] = None


class WorkerResults(BaseModel):
    """Answer of ``POST /collective_rpc``: one result a worker, by rank."""

    results: list[Any]


def build(engine: EngineClient, settings: ServerSettings) -> list[APIRouter]:
    """Routers of the control routes that the settings switch on; [] if there are none."""
    router = APIRouter(tags=["control"], dependencies=_checks())
    if settings.enable_control_routes or settings.dev_mode:
        _add_pause(router, engine)
        _add_sleep(router, engine)
        weight_swaps.add_routes(router, engine)
        weight_updates.add_routes(router, engine)
        elastic.add_routes(router, engine)
        _add_cache(router, engine)
        _add_refusals(router)
    if settings.allow_runtime_lora_updating:
        router.include_router(lora.build())
    if has_profiler(engine) or settings.enable_control_routes or settings.dev_mode:
        _add_profile(router, engine)
    routers = [router] if router.routes else []
    if settings.dev_mode:
        routers.append(_dev_routes(engine, settings))
    return routers


def _checks() -> list[Any]:
    """What each route depends on: the query names a served model, or none, and no unknown parameter."""
    return [Depends(check_named), Depends(check_query)]


def has_profiler(engine: EngineClient) -> bool:
    """True if the engine was started with something that records."""
    return bool(engine.settings.get("profiler_config", {}).get("profiler"))


def _add_pause(router: APIRouter, engine: EngineClient) -> None:
    @router.post("/pause", response_class=Response, responses=_EMPTY)
    async def pause(
        request: Request,
        wait_for_inflight_requests: Annotated[bool, Query()] = False,
        clear_cache: Annotated[bool, Query()] = True,
    ) -> Response:
        """Start no further request; answered once nothing runs any more."""
        work = all_processes.pause(
            state_of(request), wait=wait_for_inflight_requests, clear_cache=clear_cache
        )
        await request.body()  # waiting for the client's end relies on it
        name = request.scope["headrace_request_id"]
        await wait_watching(work, request, state_of(request).lifecycle, name)
        return Response()

    @router.post("/resume", response_class=Response, responses=_EMPTY)
    async def resume(request: Request) -> Response:
        """Start what waited."""
        await all_processes.resume(state_of(request))
        return Response()

    @router.get("/is_paused")
    async def is_paused() -> Paused:
        return Paused(is_paused=await engine.is_paused())


def _add_sleep(router: APIRouter, engine: EngineClient) -> None:
    @router.post("/sleep", response_class=Response, responses=_EMPTY)
    async def sleep(level: Annotated[int, Query()] = 1) -> Response:
        """Give the memory of weights and cache back, while no request runs."""
        await engine.collective_rpc("sleep", args=[level], timeout=WAKING_TIMEOUT)
        return Response()

    @router.post("/wake_up", response_class=Response, responses=_EMPTY)
    async def wake_up(
        request: Request, tags: Annotated[list[str] | None, Query()] = None
    ) -> Response:
        """Take memory again, for all parts or those named: weights, kv_cache. A part that cannot be woken
        sleeps on, and the answer says why."""
        try:
            await engine.collective_rpc("wake_up", args=[tags], timeout=WAKING_TIMEOUT)
        except NAMED as error:
            return report_named(error, request.scope["headrace_request_id"]).response()
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping() -> Sleeping:
        return Sleeping(is_sleeping=(await engine.collective_rpc("is_sleeping"))[0])


def _add_cache(router: APIRouter, engine: EngineClient) -> None:
    conflict = {"model": ErrorResponse, "description": "Requests hold cached blocks."}

    @router.post("/reset_prefix_cache", response_class=Response,
                 responses={**_EMPTY, 409: conflict})  # fmt: skip
    async def reset_prefix_cache(
        reset_running_requests: Annotated[bool, Query()] = False,
        reset_external: Annotated[bool, Query()] = False,
    ) -> Response:
        """Forget all cached prefixes."""
        if reset_external:
            raise UnsupportedFeature(
                "reset_external: must be false: what a KV connector keeps stays where it is; after this call "
                "without it, nothing of it is found",
                param="reset_external",
            )
        if not await engine.reset_prefix_cache(reset_running_requests):
            return ErrorAnswer(
                409, "requests hold cached blocks; reset_running_requests=true preempts them"
            ).response()
        return Response()


def _add_profile(router: APIRouter, engine: EngineClient) -> None:
    @router.post("/start_profile", response_class=Response, responses=_EMPTY)
    async def start_profile() -> Response:
        """Record the coming steps."""
        await engine.start_profile()
        return Response()

    @router.post("/stop_profile", response_class=Response, responses=_EMPTY)
    async def stop_profile() -> Response:
        """Write what was recorded."""
        await engine.stop_profile()
        return Response()


def _add_refusals(router: APIRouter) -> None:
    for path, (method, reason) in NOT_SERVED.items():
        router.add_api_route(
            path, _refusing(reason), methods=[method], include_in_schema=False, response_model=None
        )


def _refusing(reason: str) -> Any:
    async def refuse() -> Response:
        raise UnsupportedFeature(reason)

    return refuse


def _dev_routes(engine: EngineClient, settings: ServerSettings) -> APIRouter:
    router = json_router()
    router.dependencies += _checks()

    @router.post("/collective_rpc", responses={504: {"model": ErrorResponse}})
    async def collective_rpc(request: Request, body: WorkerCall) -> WorkerResults:
        """Call a listed method of every worker."""
        if body.kwargs:
            raise RequestError("kwargs: worker methods take none here", param="kwargs")
        try:
            async with asyncio.timeout(RPC_TIMEOUT):
                results = await engine.collective_rpc(
                    body.method, args=body.args, timeout=body.timeout
                )
        except TimeoutError:
            given = "in time" if body.timeout is None else f"in {body.timeout:g} s"
            reply = ErrorAnswer(
                504, f"collective_rpc: {body.method}: no answer from the workers {given}"
            )
            return reply.response()  # type: ignore[return-value]
        except NAMED as error:
            reply = report_named(error, request.scope["headrace_request_id"])
            return reply.response()  # type: ignore[return-value]
        return WorkerResults(results=results)

    @router.get(
        "/server_info",
        response_model=None,
        responses={200: {"content": {"text/plain": {}, "application/json": {}}}},
    )
    async def server_info(
        request: Request,
        config_format: Annotated[Literal["text", "json"], Query()] = "json",
    ) -> Response:
        """The configuration; secrets are left out."""
        info = describe(engine, settings, os.environ)
        info["weights_version"] = (await engine.stats()).weights_version
        info["is_scaling_elastic_ep"] = state_of(request).scaling.is_under_way
        if config_format == "text":
            return PlainTextResponse(pprint.pformat(info, width=100))
        return Response(msgspec.json.encode(info), media_type="application/json")

    return router


def describe(
    engine: EngineClient, settings: ServerSettings, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Engine and server settings and headrace's environment variables, without secrets."""
    server = {
        field.name: _public(field.name, getattr(settings, field.name))
        for field in dataclasses.fields(settings)
    }
    variables = {
        name: _public(name, value)
        for name, value in sorted(environ.items())
        if name.startswith("HEADRACE_")
    }
    return {"engine": dict(engine.settings), "server": server, "environment": variables}


def _public(name: str, value: Any) -> Any:
    is_secret = any(word in name.upper() for word in _SECRET) and not isinstance(value, bool)
    if is_secret and not name.lower().endswith(("_file", "keyfile", "token_ids")):
        return "(hidden)" if value else value
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
