"""Routes that ask all models together, and those that load and unload them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.exposition import generate_latest
from pydantic import BaseModel, ConfigDict, Field

from headrace_core.errors import HeadraceError, QueueFull, RequestError
from headrace_server.errors.mapping import ErrorAnswer, ErrorResponse
from headrace_server.http.routing import json_router
from headrace_server.multi_model.loading import Loading, NameTaken
from headrace_server.multi_model.models import Models
from headrace_server.observability import metric_families as families
from headrace_server.protocols.openai.bodies.models import ModelCard, ModelList
from headrace_server.routes.health import health_routes, reasons_not_ready
from headrace_server.routes.models import card, cards
from headrace_server.settings import ServerSettings
from headrace_server.state import Serving

MAX_DRAIN = 3600.0
"""Longest ``drain_timeout`` of an unloading, in seconds."""


class ModelState(BaseModel):
    """One model, as its operator sees it."""

    model_config = ConfigDict(protected_namespaces=())

    name: str
    state: str
    """``loading``, ``ready``, ``paused``, ``draining`` or ``dead``."""
    names: list[str] = []
    root: str = ""
    tasks: list[str] = []
    requests_in_flight: int = 0
    memory: dict[str, int] = {}
    """Bytes: ``weights``, ``activations`` (of the largest step), ``cache``, ``limit`` (its share)."""


class ModelStates(BaseModel):
    """Answer of ``GET /models``."""

    models: list[ModelState]
    budget: dict[str, int]
    """Bytes: ``total``, ``claimed`` and ``free`` of the budget; ``resident`` of this process."""


class Unloading(BaseModel):
    """Body of ``POST /models/unload``."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=1024)]
    drain_timeout: Annotated[float | None, Field(ge=0, le=MAX_DRAIN)] = None
    """Seconds that its requests get to finish; None: the server's own."""


def build_shared(models: Models, state: Serving) -> APIRouter:
    """Health, metrics and the list of models: the worst, the sum and the union of all."""
    router = APIRouter()

    async def why_not_ready(request: Request) -> list[str]:
        own = ["draining: the server is shutting down"] if state.lifecycle.draining else []
        return own or [
            f"{model.name}: {reason}"
            for model in models
            for reason in await reasons_not_ready(model.state)
        ]

    router.include_router(health_routes(models, state.settings, why_not_ready))
    _add_list(router, models)
    if not state.settings.disable_log_stats:
        _add_metrics(router, models, state)
    return router


def _add_list(router: APIRouter, models: Models) -> None:
    @router.get("/v1/models", tags=["models"])
    async def list_models() -> ModelList:
        """All served names."""
        found = [cards(model.state.engine.model, model.state.created) for model in models]
        return ModelList(data=[one for of_model in found for one in of_model])

    @router.get("/v1/models/{name:path}", responses={404: {"model": ErrorResponse}},
                tags=["models"])  # fmt: skip
    async def show_model(name: str) -> ModelCard:
        model = models.find(name)
        return card(name, model.state.engine.model, model.state.created)


def _add_metrics(router: APIRouter, models: Models, state: Serving) -> None:
    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}},
        tags=["metrics"],
    )  # fmt: skip
    async def metrics() -> Response:
        """Prometheus' text format, each model's under its ``model_name``."""
        of_models = [
            families.as_data(await model.state.metrics.collect(model.state.engine))
            for model in models
        ]
        added = families.added(state.traffic.registry.collect(), of_models)
        body = generate_latest(families.FixedMetrics(added))
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


def build_control(loading: Loading, settings: ServerSettings) -> list[APIRouter]:
    """The control of which models there are; [] unless control routes were asked for."""
    if not (settings.enable_control_routes or settings.dev_mode):
        return []
    router = json_router()
    router.tags = ["control"]

    @router.get("/models")
    async def show_states() -> ModelStates:
        """Every model with its state and its memory."""
        found = await loading.list()
        return ModelStates(models=[ModelState(**one) for one in found], budget=dict(loading.budget))

    @router.post("/models/load", responses={409: {"model": ErrorResponse}})
    async def load(entry: dict[str, Any]) -> ModelState:
        """Load a model by an entry as in ``--models-config``; answered once it is served."""
        try:
            model = await loading.load(entry)
        except NameTaken as error:
            return ErrorAnswer(409, str(error), error.param).response()  # type: ignore[return-value]
        except (RequestError, QueueFull):
            raise
        except HeadraceError as error:
            raise RequestError(str(error), param=getattr(error, "field", None)) from error
        return _state_named(await loading.list(), model.name)

    @router.post("/models/unload", response_class=Response, responses={200: {"content": {}}})
    async def unload(body: Unloading) -> Response:
        """Stop serving a model; answered once its requests have ended and its memory is free."""
        seconds = settings.drain_timeout if body.drain_timeout is None else body.drain_timeout
        await loading.unload(body.name, seconds)
        return Response()

    return [router]


def _state_named(found: list[dict[str, Any]], name: str) -> ModelState:
    of_name: Mapping[str, Any] = next(one for one in found if one["name"] == name)
    return ModelState(**of_name)
