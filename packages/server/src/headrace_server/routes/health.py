"""Health, readiness, version, load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from headrace_core.engine import EngineClient
from headrace_core.errors import UnsupportedFeature
from headrace_server.api_processes.all_processes import total_load
from headrace_server.engines_here import num_engines_here
from headrace_server.errors.mapping import ErrorResponse
from headrace_server.observability.fingerprint import installed_version
from headrace_server.observability.metrics import fresh_stats, is_healthy
from headrace_server.settings import ServerSettings
from headrace_server.state import ServedEngine, ServerState, serving_of, state_of

_EMPTY: dict[int | str, dict[str, Any]] = {
    200: {"description": "Yes.", "content": {}},
    503: {"description": "No.", "content": {}},
}


class Version(BaseModel):
    """Answer of ``GET /version``."""

    version: str


class Load(BaseModel):
    """Answer of ``GET /load``."""

    server_load: int


class NotReady(BaseModel):
    """Why ``GET /readyz`` is a 503, or which engines have ended (``GET /health``)."""

    reasons: list[str]


class HealthRouter:
    """Always on; needs no key (but ``/load`` does).

    - ``/health``, ``/ping``: 503 while draining, and if the engine is dead or makes no progress. Of several
      engines, one that is being replaced is named in the body of a 200; 503 if none runs.
    - ``/livez``: 503 if the engine is dead or makes no progress: restart the process.
    - ``/readyz``: 503 also while paused; the body of a 503 has the reasons.
    """

    name = "health"
    tasks: Sequence[str] = ()

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        async def reasons(request: Request) -> list[str]:
            return await reasons_not_ready(state_of(request))

        async def ended() -> EndedEngines:
            return await _ended_engines(engine)

        return health_routes(engine, settings, reasons, ended)


class EndedEngines(NamedTuple):
    """Engines of a server that do not run."""

    reasons: list[str]
    """A text for each."""
    are_all: bool
    """No engine runs."""


async def _ended_engines(engine: EngineClient) -> EndedEngines:
    """Engines that do not run, where the server has several."""
    parallel = engine.settings.get("parallel", {})
    if num_engines_here(engine.settings) == 1 and not parallel.get("enable_elastic_ep"):
        return EndedEngines([], False)
    stats = await fresh_stats(engine)
    if stats is None:
        return EndedEngines([], False)
    reasons = [one.ended for one in stats.by_engine if one.ended]
    return EndedEngines(reasons, bool(reasons) and len(reasons) == len(stats.by_engine))


def health_routes(
    engine: ServedEngine,
    settings: ServerSettings,
    why_not_ready: Callable[[Request], Awaitable[list[str]]],
    ended_engines: Callable[[], Awaitable[EndedEngines]] | None = None,
) -> APIRouter:
    """The router.

    Args:
        engine: whose health this is.
        why_not_ready: why a new request would not be started now.
        ended_engines: those of several that do not run.
    """
    router = APIRouter(tags=["health"])

    async def healthy(request: Request) -> Response:
        """200 if requests are served; 503 while draining, with a dead or stuck engine, or while none of
        several runs."""
        draining = serving_of(request).lifecycle.draining
        status = 200 if not draining and await is_healthy(engine) else 503
        ended = None if ended_engines is None else await ended_engines()
        if ended is None or not ended.reasons:
            return Response(status_code=status)
        body = NotReady(reasons=ended.reasons).model_dump_json()
        return Response(body, 503 if ended.are_all else status, media_type="application/json")

    async def live() -> Response:
        """200 while the engine works, draining or not; 503 says: restart me."""
        return Response(status_code=200 if await is_healthy(engine) else 503)

    async def ready(request: Request) -> Response:
        """200 if a new request would be started now; else 503 and why not."""
        reasons = await why_not_ready(request)
        if not reasons:
            return Response()
        body = NotReady(reasons=reasons).model_dump_json()
        return Response(body, 503, media_type="application/json")

    for path, method, handler in (
        ("/health", "GET", healthy), ("/ping", "GET", healthy), ("/ping", "POST", healthy),
        ("/livez", "GET", live),
    ):  # fmt: skip
        router.add_api_route(path, handler, methods=[method], response_class=Response,
                             responses=_EMPTY)  # fmt: skip
    router.add_api_route(
        "/readyz", ready, methods=["GET"], response_class=Response,
        responses={200: _EMPTY[200], 503: {"model": NotReady, "description": "No, because."}},
    )  # fmt: skip

    @router.get("/version")
    async def show_version() -> Version:
        return Version(version=installed_version())

    @router.get("/load", responses={400: {"model": ErrorResponse}})
    async def load(request: Request) -> Load:
        if not settings.enable_server_load_tracking:
            raise UnsupportedFeature(
                "load is not tracked; start the server with --enable-server-load-tracking"
            )
        return Load(server_load=await total_load(serving_of(request)))

    return router


async def reasons_not_ready(state: ServerState) -> list[str]:
    """Why a new request would not be started now; [] if it would."""
    reasons = []
    if state.lifecycle.draining:
        reasons.append("draining: the server is shutting down")
    if state.engine.dead_error is not None:
        reasons.append("engine dead: the engine has stopped")
    elif not await is_healthy(state.engine):
        reasons.append("engine stuck: no progress within the heartbeat limit")
    elif (ended := await _ended_engines(state.engine)).are_all:
        reasons += ended.reasons
    else:
        if await state.engine.is_paused():
            reasons.append("paused: POST /resume starts the waiting requests")
        # Engines are paused before they sleep, so both are told.
        if (stats := await fresh_stats(state.engine)) is not None and stats.sleep_level:
            reasons.append(
                "asleep: requests are refused until POST /wake_up, and reload_weights after level 2"
            )
    return reasons


ROUTER = HealthRouter()
