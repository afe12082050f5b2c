"""The application: middleware, error handlers and routers put together, nothing else."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from headrace_core import plugins
from headrace_core.engine import EngineClient
from headrace_core.errors import ConfigError
from headrace_core.served_model import ServedModel
from headrace_server import openapi
from headrace_server.api_processes.peers import Peers
from headrace_server.errors import mapping as errors
from headrace_server.http.h11_protocol import Connections
from headrace_server.http.middleware import (
    DrainGate,
    HeadRequests,
    HttpMetrics,
    Limits,
    LoadCounter,
    RequestIds,
    RootPath,
)
from headrace_server.http.paths import CONTROL_PATHS, MODEL_PATHS, OPEN_PATHS, ROUTER_PATHS
from headrace_server.http.request_pacing import AdmissionQueue
from headrace_server.http.scaling_gate import ScalingGate
from headrace_server.lora.served import ServedAdapters, check_adapters
from headrace_server.observability.fingerprint import installed_version
from headrace_server.observability.instrumentation import InstrumentedEngine, Watcher
from headrace_server.observability.load_reports import LoadReports
from headrace_server.observability.metrics import HttpTraffic, Metrics, UnfinishedRequests
from headrace_server.observability.request_log import OutputLog, ResponseLog
from headrace_server.observability.tracing import TraceHeaders, Tracing
from headrace_server.parsing.registry import load_parsers
from headrace_server.protocols.anthropic.errors import AnthropicErrors
from headrace_server.protocols.cohere.errors import CohereErrors
from headrace_server.routes import control, invocations
from headrace_server.routes.availability import INFERENCE_ROUTES, unserved
from headrace_server.routes.docs import docs_router
from headrace_server.routes.root import root_router
from headrace_server.routes.system import system_router
from headrace_server.security import profiles
from headrace_server.security.auth import KeyGate
from headrace_server.security.browser_guard import BrowserGate
from headrace_server.security.cache_scope import scoped
from headrace_server.security.keys import KeyRing, admin_keys, public_keys
from headrace_server.settings import ServerSettings, read_chat_template
from headrace_server.state import ServerState, Serving

logger = logging.getLogger(__name__)

INVOCATIONS = "/invocations"
_CONTROLLED = CONTROL_PATHS | MODEL_PATHS | ROUTER_PATHS
TOKENS_ONLY_ROUTERS = frozenset({"tokens", "health", "metrics", "models"})
"""The routers that ``tokens_only`` leaves; of others not even the 400s are there."""


def create_app(
    engine: EngineClient, settings: ServerSettings, peers: Peers | None = None
) -> FastAPI:
    """Compose the application over a running engine.

    Routers come from the entry points of ``headrace.routers``; those whose tasks the model does
    not serve are left out.

    Args:
        peers: the server's other HTTP processes, if this is one of several.

    Raises:
        ConfigError: a key file, template or middleware of the settings cannot be used.
        PluginError: a router or parser cannot be loaded.
    """
    gates = gates_of(settings)
    app = new_app(settings)
    traffic = HttpTraffic(settings.metrics_prefix)
    metrics = Metrics(settings.metrics_prefix, engine.model, traffic.registry)
    state = add_model(
        app,
        engine,
        settings,
        metrics,
        traffic=traffic,
        connections=connection_limits(settings),
        peers=peers,
    )
    add_gauges(state)
    add_control(app, state, gates)
    add_root(app, state, lambda: engine.model.names)
    close_in(app, state, gates)
    return app


def add_root(app: FastAPI, state: Serving, names: Callable[[], Sequence[str]]) -> None:
    """Add ``GET /``, unless the server is for tokens only.

    Args:
        names: of the models that are served now.
    """
    if not state.settings.tokens_only:
        app.include_router(root_router(state, names, not state.settings.disable_fastapi_docs))


def new_app(settings: ServerSettings) -> FastAPI:
    """An application without routes."""
    docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="headrace",
        version=installed_version(),
        openapi_url="/openapi.json" if docs else None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    if docs:
        app.include_router(docs_router())
    return app


def gates_of(settings: ServerSettings) -> Gates:
    """Access checks of the application.

    Raises:
        ConfigError: a key file cannot be used; or there must be a key.
    """
    gates = Gates(public_keys(settings), admin_keys(settings))
    profiles.check_listening(settings, len(gates.public))
    profiles.check_metrics(settings, len(gates.public))
    return gates


def connection_limits(settings: ServerSettings) -> Connections:
    """Limits on connections of the public port."""
    return Connections(
        settings.share(settings.max_connections),
        settings.share(profiles.connections_per_peer(settings)),
        settings.header_timeout,
    )


def add_model(
    app: FastAPI,
    engine: EngineClient,
    settings: ServerSettings,
    metrics: Metrics,
    **shared: Any,
) -> ServerState:
    """Add what one model answers, and nothing of what stands around it.

    Args:
        shared: further fields of the state: what the application has in common with others.

    Raises: as :func:`create_app`.
    """
    tracing = _tracing(engine, settings)
    state = ServerState(
        engine=_watched(engine, settings, metrics, tracing),
        settings=settings,
        metrics=metrics,
        chat_template=read_chat_template(settings),
        parsers=load_parsers(settings),
        tracing=tracing,
        **shared,
    )
    check_adapters(settings, engine)
    if engine.model.max_loras:
        state.adapters = ServedAdapters(state)
    app.state.headrace = state
    errors.install(app, stacks=bool(settings.log_error_stack))
    _add_routers(app, state)
    _count_spans(state)
    app.add_middleware(LoadReports, engine=state.engine)
    if settings.enable_control_routes or settings.dev_mode:
        app.add_middleware(
            ScalingGate, scaling=state.scaling, paths={*INFERENCE_ROUTES, INVOCATIONS}
        )
    return state


def close_in(
    app: FastAPI,
    state: Serving,
    gates: Gates,
    inner: Callable[[], Sequence[FastAPI]] = lambda: (),
) -> None:
    """Put what every request passes around an application: limits, gates, ids, counts.

    Args:
        inner: applications within it, for the OpenAPI document.
    """
    _add_middleware(app, state, gates)
    settings = state.settings
    openapi.install(
        app,
        has_keys=bool(gates.public),
        narrow=settings.api_key_scope == "v1",
        metrics_open=not settings.protect_metrics,
        inner=inner,
    )
    if state.admin is not None:
        _close_in_admin(state.admin, state, gates)
    _log_what_is_open(state, gates)


class Gates(NamedTuple):
    """Access checks."""

    public: KeyRing
    control: KeyRing
    """Keys of control routes; empty: those of ``public``."""


def _tracing(engine: EngineClient, settings: ServerSettings) -> Tracing | None:
    endpoint = settings.otlp_traces_endpoint
    return None if endpoint is None else Tracing(engine.model, endpoint)


def _watched(
    engine: EngineClient, settings: ServerSettings, metrics: Metrics, tracing: Tracing | None
) -> EngineClient:
    """The engine as all routes see it."""
    watchers: list[Watcher] = [] if tracing is None else [tracing]
    if not settings.disable_log_stats:
        watchers.append(UnfinishedRequests(metrics))
    if settings.enable_log_outputs:
        watchers.append(OutputLog(settings.max_log_len))
    if settings.prefix_cache_scope == "key":
        return InstrumentedEngine(engine, watchers, scoped)
    return InstrumentedEngine(engine, watchers) if watchers else engine


def add_gauges(state: Serving) -> None:
    """Metrics of what the application itself knows."""
    traffic, lifecycle, connections = state.traffic, state.lifecycle, state.connections
    traffic.add_gauge("http_requests_in_flight", "Inference requests being answered.",
                      lambda: lifecycle.num_in_flight)  # fmt: skip
    traffic.add_gauge("http_connections_open", "Open connections of the public port.",
                      lambda: connections.num_open)  # fmt: skip


def _count_spans(state: ServerState) -> None:
    if state.tracing is not None:
        metrics, counts = state.metrics, state.tracing.counts
        metrics.add_counter("trace_spans_ended", "Spans made.", lambda: counts.ended)
        metrics.add_counter("trace_spans_exported", "Spans that a collector took.",
                            lambda: counts.exported)  # fmt: skip
        metrics.add_counter("trace_spans_failed", "Spans that no collector took.",
                            lambda: counts.failed)  # fmt: skip


def _add_routers(app: FastAPI, state: ServerState) -> None:
    tasks = set(state.engine.model.tasks)
    for name, plugin in plugins.installed("headrace.routers").items():
        if state.settings.tokens_only and name not in TOKENS_ONLY_ROUTERS:
            continue
        router = plugin.load()
        if router.tasks and not set(router.tasks) & tasks:
            logger.debug("router %s left out: it serves %s", name, ", ".join(router.tasks))
            continue
        if name == "metrics" and state.settings.disable_log_stats:
            continue
        built: APIRouter = router.build(state.engine, state.settings)
        state.paths |= _paths_of(built)
        app.include_router(built)
    if state.settings.tokens_only:
        return
    system = system_router()
    state.paths |= _paths_of(system)
    app.include_router(system)
    app.include_router(invocations.build(lambda: state.paths, app.router))
    state.paths.add(INVOCATIONS)
    for path in INFERENCE_ROUTES.keys() - state.paths:
        app.add_api_route(
            path,
            _refusing(path, state.engine.model),
            methods=["POST"],
            include_in_schema=False,
            response_model=None,
        )


def _paths_of(router: APIRouter) -> set[str]:
    """The paths of a router as people write them: ``/v1/models/{name}``, without convertors."""
    return {route.path_format for route in router.routes if isinstance(route, APIRoute)}


def add_control(app: FastAPI, state: ServerState, gates: Gates) -> None:
    """A model's control routes, here or in ``state.admin``; none unless they were asked for."""
    routers = control.build(state.engine, state.settings)
    if routers and may_control(state.settings, gates):
        add_control_routers(app, state, routers)


def may_control(settings: ServerSettings, gates: Gates) -> bool:
    """True if control routes may be served.

    Raises:
        ConfigError: they were asked for, and there is no key.
    """
    if gates.public or gates.control or _may_be_keyless(settings):
        return True
    if settings.enable_control_routes:
        raise ConfigError(
            "enable_control_routes (or admin_port): needs a key; set HEADRACE_ADMIN_API_KEY, "
            "--admin-api-key-file or a key for all routes",
            field="enable_control_routes",
        )
    logger.warning(
        "control routes are not served: they need a key (HEADRACE_API_KEY, or "
        "HEADRACE_ADMIN_API_KEY), or --dev-mode on loopback"
    )
    return False


def add_control_routers(app: FastAPI, state: Serving, routers: Sequence[APIRouter]) -> None:
    """Add routers of control routes, here or for the admin port."""
    paths = set().union(*map(_paths_of, routers))
    assert paths <= _CONTROLLED, "a control route that no gate knows"
    if state.settings.admin_port is None:
        state.paths |= paths
    else:
        app = state.admin = FastAPI(
            title="headrace control", version=installed_version(), openapi_url=None,
            docs_url=None, redoc_url=None, redirect_slashes=False,
        )  # fmt: skip
        app.state.headrace = state
        errors.install(app, stacks=bool(state.settings.log_error_stack))
    for router in routers:
        app.include_router(router)


def _may_be_keyless(settings: ServerSettings) -> bool:
    """On a developer's own machine; browsers are kept out by :class:`BrowserGate`."""
    admin_is_local = settings.admin_port is None or profiles.is_local(settings.admin_host, None)
    return settings.dev_mode and profiles.is_local(settings.host, settings.uds) and admin_is_local


def _close_in_admin(admin: FastAPI, state: Serving, gates: Gates) -> None:
    settings = state.settings
    admin.add_middleware(HeadRequests)
    _add_limits(admin, state)
    if gates.control or gates.public:
        admin.add_middleware(
            KeyGate, keys=gates.control or gates.public, scope="all", open_paths=()
        )
    admin.add_middleware(
        BrowserGate, check_hosts=True, check_origin=True, host=settings.admin_host,
        hosts=settings.allowed_hosts,
    )  # fmt: skip
    admin.add_middleware(RequestIds, in_response=settings.enable_request_id_headers)


def _refusing(path: str, model: ServedModel) -> Any:
    async def refuse(request: Request) -> Response:
        raise unserved(path, model)

    return refuse


def _add_middleware(app: FastAPI, state: Serving, gates: Gates) -> None:
    """Innermost first: each call of ``add_middleware`` wraps what is there."""
    settings = state.settings
    if settings.enable_server_load_tracking:
        app.add_middleware(LoadCounter, state=state, paths={*INFERENCE_ROUTES, INVOCATIONS})
    for path in settings.middleware:
        _add_foreign(app, foreign_middleware(path))
    if settings.middleware:
        app.add_middleware(errors.AnswerErrors)
    app.add_middleware(TraceHeaders, enabled=settings.otlp_traces_endpoint is not None)
    app.add_middleware(DrainGate, lifecycle=state.lifecycle)
    _add_limits(app, state)
    if gates.public or (gates.control and state.admin is None):
        _add_gate(app, state, gates)
    keyless_control = bool(state.paths & _CONTROLLED) and not (gates.public or gates.control)
    if settings.check_hosts or settings.check_origin or keyless_control:
        app.add_middleware(
            BrowserGate, check_hosts=settings.check_hosts or keyless_control,
            check_origin=settings.check_origin or keyless_control, host=settings.host,
            hosts=settings.allowed_hosts, origins=settings.allowed_origins,
            by_name=settings.uds is None,
        )  # fmt: skip
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(CohereErrors)
    app.add_middleware(HeadRequests)
    if settings.log_responses:
        app.add_middleware(ResponseLog, limit=settings.max_log_len)
    direct = not settings.middleware and not settings.log_responses
    app.add_middleware(HttpMetrics, traffic=state.traffic, direct=direct)
    app.add_middleware(RequestIds, in_response=settings.enable_request_id_headers)
    app.add_middleware(AdmissionQueue)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)


def _add_limits(app: FastAPI, state: Serving) -> None:
    settings = state.settings
    model = state.engine.model if isinstance(state, ServerState) else None
    app.add_middleware(
        Limits,
        max_headers=settings.h11_max_header_count,
        max_body=profiles.body_limit(settings, model),
        body_timeout=settings.body_timeout,
        min_rate=settings.min_body_rate,
    )


def _open_paths(settings: ServerSettings) -> frozenset[str]:
    return OPEN_PATHS if settings.protect_metrics else OPEN_PATHS | {"/metrics"}


def _add_gate(app: FastAPI, state: Serving, gates: Gates) -> None:
    settings = state.settings
    app.add_middleware(
        KeyGate,
        keys=gates.public,
        scope=settings.api_key_scope,
        open_paths=_open_paths(settings),
        closed_paths={"/metrics"} if settings.protect_metrics else (),
        control_paths=_CONTROLLED if state.admin is None else (),
        control_keys=gates.control,
    )


def _log_what_is_open(state: Serving, gates: Gates) -> None:
    """The routes that need no key, and one block of warnings: what an operator should know."""
    settings = state.settings
    if gates.public and settings.api_key_scope == "all":
        logger.info("these routes need no key: %s", ", ".join(sorted(_open_paths(settings))))
    elif gates.public:
        closed = {"/metrics"} - _open_paths(settings)
        outside = sorted(p for p in state.paths - closed if not p.startswith("/v1"))
        logger.info("these routes need no key: %s", ", ".join(outside))
    lines = profiles.warnings(settings, len(gates.public))
    if lines:
        hint = "" if settings.hardened else "\n(--hardened has strict values; docs: security)"
        logger.warning("open settings:\n%s%s", "\n".join(f"- {line}" for line in lines), hint)


def foreign_middleware(path: str) -> Any:
    """Middleware by import path: a class is ASGI middleware, a coroutine function is HTTP's.

    Raises:
        ConfigError: it cannot be imported, whatever its module raises, or is neither.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"middleware = {path!r}: could not be imported: {type(error).__name__}: {error}",
            field="middleware",
        ) from error
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"middleware = {path!r}: must be a class or a coroutine function, not "
            f"{type(found).__name__}",
            field="middleware",
        )
    return found


def _add_foreign(app: FastAPI, found: Any) -> None:
    if inspect.isclass(found):
        app.add_middleware(cast(Any, found))
    else:
        app.middleware("http")(found)
