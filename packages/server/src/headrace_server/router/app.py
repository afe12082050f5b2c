"""The application of a router: its own few routes, and everything else passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

from headrace_core.errors import RequestError, UnknownModel
from headrace_server.app import (
    add_control_routers,
    add_gauges,
    close_in,
    connection_limits,
    gates_of,
    may_control,
    new_app,
)
from headrace_server.errors import mapping as errors
from headrace_server.errors.mapping import ErrorAnswer
from headrace_server.http.routing import json_router
from headrace_server.observability.fingerprint import installed_version
from headrace_server.observability.metrics import HttpTraffic
from headrace_server.router.prefill import Prefill
from headrace_server.router.proxy import Proxy
from headrace_server.router.servers import MAX_LIST, Server, ServerPool
from headrace_server.router.upstream import UpstreamError
from headrace_server.settings import ServerSettings
from headrace_server.state import Serving

_PASSED_TO_LISTS = frozenset({b"authorization", b"x-api-key", b"accept"})


class ServerState(BaseModel):
    """One server, as the router sees it."""

    server: str
    available: bool
    draining: bool
    problem: str
    """Why it is not well; "": it is."""
    requests_in_flight: int
    requests: int
    failures: int
    models: list[str] | None
    """Names of what it serves; null: it has not said."""


class ServerStates(BaseModel):
    """Answer of ``GET /router/servers``."""

    servers: list[ServerState]


class NamedServer(BaseModel):
    """Body of ``POST /router/drain`` and ``POST /router/undrain``."""

    model_config = ConfigDict(extra="forbid")

    server: Annotated[str, Field(max_length=2048)]
    """URL, as the router was given it."""


def create_router_app(
    pool: ServerPool, settings: ServerSettings, prefilling: ServerPool | None = None
) -> FastAPI:
    """Compose the application.

    Args:
        pool: the servers.
        settings: of the router's own port.
        prefilling: servers that compute prompts for them; None: there are none.

    Raises:
        ConfigError: a key file of the settings cannot be used; or there must be a key.
    """
    gates = gates_of(settings)
    app = new_app(settings)
    pools = [pool] if prefilling is None else [pool, prefilling]
    state = Serving(
        engine=_NoEngine(pools),
        settings=settings,
        traffic=HttpTraffic(settings.metrics_prefix),
        connections=connection_limits(settings),
    )
    app.state.headrace = state
    errors.install(app, stacks=bool(settings.log_error_stack))
    add_gauges(state)
    prefill = None if prefilling is None else Prefill(prefilling)
    proxy = Proxy(pool, state.lifecycle, prefill)
    collector = _RouterCollector(settings.metrics_prefix, pools, proxy, prefill)
    state.traffic.registry.register(collector)
    app.include_router(_health(pool, state))
    app.include_router(_models(pool))
    if (settings.enable_control_routes or settings.dev_mode) and may_control(settings, gates):
        add_control_routers(app, state, [_control(pools)])
    app.router.default = proxy
    app.router.lifespan_context = _lifespan(pools)
    close_in(app, state, gates)
    return app


class _NoEngine:
    """What running a server needs of an engine (:class:`headrace_server.state.ServedEngine`)."""

    dead_error: BaseException | None = None

    def __init__(self, pools: Sequence[ServerPool]) -> None:
        self._pools = pools

    async def check_health(self) -> None:
        """Nothing can be wrong here."""

    async def shutdown(self) -> None:
        for pool in self._pools:
            pool.close()


def _lifespan(pools: Sequence[ServerPool]) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # So that the first request finds a server.
        await asyncio.gather(*(pool.look() for pool in pools))
        watching = [asyncio.create_task(pool.watch()) for pool in pools]
        yield
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    return lifespan


def _health(pool: ServerPool, state: Serving) -> APIRouter:
    router = APIRouter()

    async def healthy() -> Response:
        """200 if a server takes requests; 503 while draining, and if none does."""
        return Response(status_code=200 if pool.available and not state.lifecycle.draining else 503)

    async def live() -> Response:
        """200: the router's process works, whatever its servers do."""
        return Response()

    async def ready() -> Response:
        """200 if a new request would be passed on now; else 503 and why not."""
        reasons = ["draining: the router is shutting down"] if state.lifecycle.draining else []
        if not pool.available:
            reasons += [
                f"{one.name}: {one.problem or 'drained by its operator'}" for one in pool.servers
            ]
        body = msgspec.json.encode({"reasons": reasons}) if reasons else b""
        return Response(body, 503 if reasons else 200, media_type="application/json")

    for path, method, handler in (
        ("/health", "GET", healthy), ("/ping", "GET", healthy), ("/ping", "POST", healthy),
        ("/livez", "GET", live), ("/readyz", "GET", ready),
    ):  # fmt: skip
        router.add_api_route(path, handler, methods=[method], response_class=Response)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": installed_version()}

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        body = generate_latest(state.traffic.registry)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})

    return router


def _models(pool: ServerPool) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", response_class=Response)
    async def list_models(request: Request) -> Response:
        """The models of all servers, each name once."""
        return _as_answer(await _all_models(pool, request))

    @router.get("/v1/models/{name:path}", response_class=Response)
    async def show_model(name: str, request: Request) -> Response:
        """One model of a server that has it."""
        found = await _all_models(pool, request)
        if isinstance(found, ErrorAnswer):
            return found.response()
        for card in found:
            if card.get("id") == name:
                return _as_answer(card)
        raise UnknownModel(f"model: {name!r} is served by none of the servers", param="model")

    return router


def _as_answer(found: list[dict[str, Any]] | dict[str, Any] | ErrorAnswer) -> Response:
    if isinstance(found, ErrorAnswer):
        return found.response()
    data = {"object": "list", "data": found} if isinstance(found, list) else found
    return Response(msgspec.json.encode(data), media_type="application/json")


async def _all_models(pool: ServerPool, request: Request) -> list[dict[str, Any]] | ErrorAnswer:
    """Descriptions of all models, the first server's for each name; why there are none."""
    headers = list(pool.key_headers) or [
        (k, v) for k, v in request.headers.raw if k in _PASSED_TO_LISTS
    ]
    lists = await asyncio.gather(*(_models_of(one, headers) for one in pool.available))
    found: dict[str, dict[str, Any]] = {}
    for one in lists:
        for card in one if isinstance(one, list) else ():
            found.setdefault(str(card.get("id")), card)
    if found:
        return list(found.values())
    status = next((one for one in lists if isinstance(one, int)), 503)
    message = "no server can be asked for its models" if status == 503 else (
        f"the servers answered {status}"
    )  # fmt: skip
    return ErrorAnswer(status, message)


async def _models_of(
    server: Server, headers: list[tuple[bytes, bytes]]
) -> list[dict[str, Any]] | int:
    """Descriptions of a server's models; else the status of its answer, 503 without one."""
    try:
        came = await server.upstream.request("GET", b"/v1/models", headers)
        try:
            body = await came.read(MAX_LIST)
        finally:
            came.close()
        if came.status != 200:
            return came.status
        return msgspec.json.decode(body, type=dict[str, Any])["data"]  # type: ignore[no-any-return]
    except (UpstreamError, msgspec.MsgspecError, KeyError):
        return 503


def _control(pools: Sequence[ServerPool]) -> APIRouter:
    """Looking at the servers, and taking one out: its requests end, and it gets no others."""
    router = json_router()
    router.tags = ["control"]

    def named(body: NamedServer) -> Server:
        server = next(filter(None, (pool.find(body.server) for pool in pools)), None)
        if server is None:
            known = ", ".join(one.url for pool in pools for one in pool.servers)
            raise RequestError(
                f"server: {body.server!r} is none of the router's: {known}", param="server"
            )
        return server

    @router.get("/router/servers")
    async def servers() -> ServerStates:
        return ServerStates(servers=[_state_of(one) for pool in pools for one in pool.servers])

    @router.post("/router/drain")
    async def drain(body: NamedServer) -> ServerState:
        """Send a server no further requests; those in flight go on."""
        server = named(body)
        server.is_draining = True
        return _state_of(server)

    @router.post("/router/undrain")
    async def undrain(body: NamedServer) -> ServerState:
        """Send a server requests again."""
        server = named(body)
        server.is_draining = False
        return _state_of(server)

    return router


def _state_of(server: Server) -> ServerState:
    return ServerState(
        server=server.url, available=server.is_available, draining=server.is_draining,
        problem=server.problem, requests_in_flight=server.in_flight, requests=server.num_requests,
        failures=server.num_failures, models=None if server.models is None else sorted(server.models),
    )  # fmt: skip


class _RouterCollector(Collector):
    """The router's own counts, by server where there are several."""

    def __init__(
        self, prefix: str, pools: Sequence[ServerPool], proxy: Proxy, prefill: Prefill | None
    ) -> None:
        self._prefix = prefix + "router_"
        self._pools = pools
        self._proxy, self._prefill = proxy, prefill

    def collect(self) -> Iterator[Metric]:
        servers = [server for pool in self._pools for server in pool.servers]
        proxy, prefill = self._proxy, self._prefill
        gauges = (
            ("server_available", "1 if the server gets requests.", "is_available"),
            ("server_requests_in_flight", "Requests that the server answers.", "in_flight"),
        )
        counters = (
            ("server_requests", "Requests sent to the server.", "num_requests"),
            ("server_failures", "Requests to which the server gave no whole answer.", "num_failures"),
        )  # fmt: skip
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, field in rows:
                family = kind(self._prefix + name, text, labels=("server",))
                for server in servers:
                    family.add_metric((server.url,), float(getattr(server, field)))
                yield family
        totals = [
            ("retries", "Requests sent to another server.", proxy.num_retries),
            ("broken_answers", "Answers that broke off after their first byte.", proxy.num_broken),
            ("refused_requests", "Requests that no server took.", proxy.num_refused),
        ]
        if prefill is not None:
            totals += [
                ("prefills", "Prompts that a server of --prefill computed.", prefill.num_divided),
                ("whole_requests", "Requests for which none did.", prefill.num_whole),
            ]
        for name, text, value in totals:
            yield CounterMetricFamily(self._prefix + name, text, value=float(value))
