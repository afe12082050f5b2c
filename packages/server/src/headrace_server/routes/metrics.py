"""``GET /metrics``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from headrace_core.engine import EngineClient
from headrace_server.settings import ServerSettings
from headrace_server.state import state_of


class MetricsRouter:
    """Prometheus' text format."""

    name = "metrics"
    tasks: Sequence[str] = ()

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = APIRouter(tags=["metrics"])

        @router.get(
            "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
        )
        async def metrics(request: Request) -> Response:
            state = state_of(request)
            others = await state.peers.ask("metrics") if state.peers is not None else []
            body = await state.metrics.expose(engine, others)
            return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})

        return router


ROUTER = MetricsRouter()
