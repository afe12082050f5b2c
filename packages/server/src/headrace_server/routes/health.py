"""Health, readiness, version, load."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from headrace_core.engine import EngineClient
from headrace_core.errors import EngineDead, UnsupportedFeature
from headrace_server.settings import ServerSettings
from headrace_server.state import state_of


class Version(BaseModel):
    """Answer of ``GET /version``."""

    version: str


class Load(BaseModel):
    """Answer of ``GET /load``."""

    server_load: int


class HealthRouter:
    """Always on; needs no key (but ``/load`` does)."""

    name = "health"
    tasks: Sequence[str] = ()

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = APIRouter(tags=["health"])

        async def healthy() -> bool:
            try:
                await engine.check_health()
            except EngineDead:
                return False
            return True

        async def ready(request: Request) -> Response:
            """200 if new requests are taken; 503 while draining or with a dead engine."""
            draining = state_of(request).lifecycle.draining
            return Response(status_code=200 if not draining and await healthy() else 503)

        async def live() -> Response:
            """200 while the engine works, draining or not; 503 says: restart me."""
            return Response(status_code=200 if await healthy() else 503)

        for path in ("/health", "/readyz"):
            router.add_api_route(path, ready, methods=["GET"], response_class=Response,
                                 responses={503: {}})  # fmt: skip
        router.add_api_route("/livez", live, methods=["GET"], response_class=Response,
                             responses={503: {}})  # fmt: skip
        for method in ("GET", "POST"):
            router.add_api_route("/ping", ready, methods=[method], response_class=Response,
                                 responses={503: {}})  # fmt: skip

        @router.get("/version")
        async def show_version() -> Version:
            return Version(version=installed_version())

        @router.get("/load")
        async def load(request: Request) -> Load:
            if not settings.enable_server_load_tracking:
                raise UnsupportedFeature(
                    "load is not tracked; start the server with --enable-server-load-tracking"
                )
            return Load(server_load=state_of(request).load)

        return router


def installed_version() -> str:
    """Version of ``headrace``; of this package if only it is installed."""
    for distribution in ("headrace", "headrace-server"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


ROUTER = HealthRouter()
