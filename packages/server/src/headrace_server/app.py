"""The application: middleware, error handlers and routers put together, nothing else."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any, cast

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from headrace_core import plugins
from headrace_core.engine import EngineClient
from headrace_core.errors import ConfigError
from headrace_server import errors
from headrace_server.anthropic.errors import AnthropicErrors
from headrace_server.auth import KeyGate, load_keys
from headrace_server.errors import Answer
from headrace_server.metrics import Metrics
from headrace_server.middleware import (
    DrainGate,
    HttpMetrics,
    Limits,
    LoadCounter,
    RequestIds,
    RootPath,
)
from headrace_server.parsers import load_parsers
from headrace_server.paths import OPEN_PATHS
from headrace_server.routes.health import installed_version
from headrace_server.settings import ServerSettings, read_chat_template
from headrace_server.state import ServerState

logger = logging.getLogger(__name__)

INFERENCE_ROUTES: Mapping[str, str] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat completions (it needs a model with a chat template)",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
    "/v1/score": "scoring",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/pooling": "pooling",
    "/classify": "classification",
    "/score": "scoring",
    "/rerank": "reranking",
    "/inference/v1/generate": "tokens in, tokens out",
}
"""POST routes that clients know; those that nobody serves here answer 400 saying so."""


def create_app(engine: EngineClient, settings: ServerSettings) -> FastAPI:
    """Compose the application over a running engine.

    Routers come from the entry points of ``headrace.routers``; those whose tasks the model does
    not serve are left out.

    Raises:
        ConfigError: a key file, template or middleware of the settings cannot be used.
        PluginError: a router or parser cannot be loaded.
    """
    docs = not settings.disable_fastapi_docs
    app = FastAPI(
        title="headrace",
        version=installed_version(),
        openapi_url="/openapi.json" if docs else None,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        redirect_slashes=False,
    )
    state = ServerState(
        engine=engine,
        settings=settings,
        metrics=Metrics(settings.metrics_prefix, engine.model),
        chat_template=read_chat_template(settings),
        parsers=load_parsers(settings),
    )
    app.state.headrace = state
    errors.install(app)
    _add_routers(app, state)
    _add_middleware(app, state)
    return app


def _add_routers(app: FastAPI, state: ServerState) -> None:
    tasks = set(state.engine.model.tasks)
    for name, plugin in plugins.installed("headrace.routers").items():
        router = plugin.load()
        if router.tasks and not set(router.tasks) & tasks:
            logger.info("router %s left out: it serves %s", name, ", ".join(router.tasks))
            continue
        built: APIRouter = router.build(state.engine, state.settings)
        state.paths.update(route.path for route in built.routes if isinstance(route, APIRoute))
        app.include_router(built)
    for path in INFERENCE_ROUTES.keys() - state.paths:
        app.add_api_route(
            path,
            _refusing(INFERENCE_ROUTES[path]),
            methods=["POST"],
            include_in_schema=False,
            response_model=None,
        )


def _refusing(title: str) -> Any:
    async def refuse(request: Request) -> Response:
        return Answer(400, f"the model, as served here, does not support {title}").response()

    return refuse


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """Innermost first: each call of ``add_middleware`` wraps what is there."""
    settings = state.settings
    if settings.enable_server_load_tracking:
        app.add_middleware(LoadCounter, state=state, paths=INFERENCE_ROUTES.keys())
    for path in settings.middleware:
        _add_foreign(app, path)
    app.add_middleware(DrainGate, lifecycle=state.lifecycle)
    app.add_middleware(
        Limits, max_headers=settings.h11_max_header_count, max_body=settings.max_body_bytes
    )
    keys = load_keys(settings)
    if keys:
        _add_gate(app, state, keys)
    elif settings.uds is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning(
            "listening on %s without a key: anybody who reaches this port can use the model and "
            "read /metrics; set HEADRACE_API_KEY or --api-key-file",
            settings.host or "all interfaces",
        )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    app.add_middleware(AnthropicErrors)
    app.add_middleware(HttpMetrics, metrics=state.metrics, direct=not settings.middleware)
    app.add_middleware(RequestIds, in_response=settings.enable_request_id_headers)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)


def _add_gate(app: FastAPI, state: ServerState, keys: tuple[str, ...]) -> None:
    settings = state.settings
    opened = OPEN_PATHS if settings.protect_metrics else OPEN_PATHS | {"/metrics"}
    narrow = settings.api_key_scope == "v1"
    if narrow:
        outside = sorted(path for path in state.paths if not path.startswith("/v1"))
        logger.warning("api_key_scope v1: these need no key: %s", ", ".join(outside))
    else:
        logger.info("these routes need no key: %s", ", ".join(sorted(opened)))
    app.add_middleware(KeyGate, keys=keys, scope=settings.api_key_scope, open_paths=opened)


def _add_foreign(app: FastAPI, path: str) -> None:
    """Middleware by import path: a class is ASGI middleware, a coroutine function is HTTP's."""
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"middleware = {path!r}: could not be imported ({type(error).__name__})",
            field="middleware",
        ) from error
    if inspect.isclass(found):
        app.add_middleware(cast(Any, found))
    elif inspect.iscoroutinefunction(found):
        app.middleware("http")(found)
    else:
        raise ConfigError(
            f"middleware = {path!r}: must be a class or a coroutine function, not "
            f"{type(found).__name__}",
            field="middleware",
        )
