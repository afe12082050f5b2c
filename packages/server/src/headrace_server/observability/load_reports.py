"""Load reports in answers (ORCA), for balancers that ask with ``endpoint-load-metrics-format``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_core.engine import EngineClient, EngineStats
from headrace_server.http.paths import route_path
from headrace_server.observability.metrics import fresh_stats

logger = logging.getLogger(__name__)

ASKED = b"endpoint-load-metrics-format"
ANSWERED = b"endpoint-load-metrics"
PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
FORMATS = ("TEXT", "JSON")


class LoadReports:
    """ASGI middleware: answers of completions and chats carry the engine's load, if asked to."""

    def __init__(self, app: ASGIApp, engine: EngineClient) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = None
        if scope["type"] == "http" and route_path(scope) in PATHS:
            wanted = next((v for k, v in scope["headers"] if k == ASKED), None)
        if wanted is None:
            await self._app(scope, receive, send)
            return
        kind = wanted.decode("latin-1").strip().upper()
        if kind not in FORMATS:
            logger.warning("load report in format %r was asked for; known: TEXT, JSON", kind[:32])
            await self._app(scope, receive, send)
            return

        async def report(message: Message) -> None:
            if message["type"] == "http.response.start":
                stats = await fresh_stats(self._engine)
                if stats is not None:
                    header = (ANSWERED, describe(load_of(stats), kind).encode())
                    message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, report)


def load_of(stats: EngineStats) -> dict[str, float]:
    """Figures by which a balancer decides."""
    return {
        "kv_cache_usage_perc": stats.kv_cache_usage,
        "num_requests_waiting": stats.num_requests_waiting,
        "num_requests_running": stats.num_requests_running,
    }


def describe(load: Mapping[str, float], kind: str) -> str:
    """The header's value: the format's name, then the numbers."""
    if kind == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={load[name]:g}" for name in load)
    return "JSON " + json.dumps({"named_metrics": dict(load)})
