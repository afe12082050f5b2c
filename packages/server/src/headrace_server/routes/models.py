"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request

from headrace_core.engine import EngineClient
from headrace_core.errors import UnknownModel
from headrace_core.served_model import ServedModel
from headrace_server.errors.mapping import ErrorResponse
from headrace_server.protocols.openai.bodies.models import ModelCard, ModelList, ModelPermission
from headrace_server.settings import ServerSettings
from headrace_server.state import state_of


class ModelsRouter:
    """Cards of the served names."""

    name = "models"
    tasks: Sequence[str] = ()

    def build(self, engine: EngineClient, settings: ServerSettings) -> APIRouter:
        router = APIRouter(tags=["models"])

        @router.get("/v1/models")
        async def list_models(request: Request) -> ModelList:
            created = state_of(request).created
            return ModelList(data=cards(engine.model, created))

        @router.get("/v1/models/{name:path}", responses={404: {"model": ErrorResponse}})
        async def show_model(name: str, request: Request) -> ModelCard:
            if name not in engine.model.names:
                raise UnknownModel(f"model {name[:256]!r} is not served", param="model")
            return card(name, engine.model, state_of(request).created)

        return router


def cards(model: ServedModel, created: int) -> list[ModelCard]:
    """One for each of its names."""
    return [card(name, model, created) for name in model.names]


def card(name: str, model: ServedModel, created: int) -> ModelCard:
    """Entry of a served name, as clients get it.

    Args:
        created: since when it is served, in seconds of Unix time.
    """
    return ModelCard(
        id=name,
        created=created,
        root=model.root,
        max_model_len=model.max_model_len,
        supported_tasks=sorted(model.tasks),
        permission=[ModelPermission(created=created)],
    )


ROUTER = ModelsRouter()
