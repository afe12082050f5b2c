"""The application around several models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from headrace_server.app import (
    Gates,
    add_control,
    add_control_routers,
    add_gauges,
    add_model,
    add_root,
    close_in,
    connection_limits,
    gates_of,
    may_control,
    new_app,
)
from headrace_server.errors import mapping as errors
from headrace_server.multi_model.dispatch import Dispatcher
from headrace_server.multi_model.loading import LoadedModel, Loader, Loading
from headrace_server.multi_model.models import Models, OneModel
from headrace_server.multi_model.routes import build_control, build_shared
from headrace_server.observability.metrics import HttpTraffic, Metrics
from headrace_server.settings import ServerSettings
from headrace_server.state import Lifecycle, Serving


def create_front(
    loaded: Sequence[LoadedModel], settings: ServerSettings, loader: Loader
) -> FastAPI:
    """Compose the application over running engines.

    Args:
        loaded: the models to begin with, by different names.
        settings: of the server.
        loader: loads further models.

    Raises: as :func:`headrace_server.app.create_app`.
    """
    gates = gates_of(settings)
    models = Models()
    app = new_app(settings)
    state = Serving(
        engine=models,
        settings=settings,
        traffic=HttpTraffic(settings.metrics_prefix),
        connections=connection_limits(settings),
    )
    app.state.headrace = state
    errors.install(app, stacks=bool(settings.log_error_stack))
    add_gauges(state)

    def compose(one: LoadedModel) -> OneModel:
        app.openapi_schema = None  # it tells of other routes from now on
        return _compose(one, state, gates)

    loading = Loading(models, loader, compose)
    state.engine = _AllEngines(models, loading)
    app.include_router(build_shared(models, state))
    add_root(app, state, lambda: models.names)
    routers = build_control(loading, settings)
    if routers and may_control(settings, gates):
        add_control_routers(app, state, routers)
    for one in loaded:
        models.add(compose(one))
    state.paths.update(*(model.state.paths for model in models))
    app.router.default = Dispatcher(models, lambda model: model.app)
    if state.admin is not None:
        state.admin.router.default = Dispatcher(models, lambda model: model.state.admin)
    app.router.lifespan_context = _lifespan(models)
    close_in(app, state, gates, lambda: [model.app for model in models])
    return app


def _compose(one: LoadedModel, front: Serving, gates: Gates) -> OneModel:
    """A model's application: nothing stands around its routes, as all that does is the front's."""
    settings = one.settings
    app = new_app(settings)
    state = add_model(
        app,
        one.engine,
        settings,
        Metrics(settings.metrics_prefix, one.engine.model),
        traffic=front.traffic,
        lifecycle=Lifecycle(front.lifecycle),
        connections=front.connections,
        off_loop=front.off_loop,
        startup=one.startup,
    )
    add_control(app, state, gates)
    return OneModel(app, state)


class _AllEngines:
    """All engines and whatever loads: what the server ends with."""

    def __init__(self, models: Models, loading: Loading) -> None:
        self._models = models
        self._loading = loading

    @property
    def dead_error(self) -> BaseException | None:
        return self._models.dead_error

    async def check_health(self) -> None:
        await self._models.check_health()

    async def shutdown(self) -> None:
        await self._loading.finish()
        await self._models.shutdown()


def _lifespan(models: Models) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for model in models:
            await model.begin()
        yield

    return lifespan
