"""``GET /v1/models`` and ``GET /v1/models/{name}``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request

from headrace_core.engine import EngineClient
from headrace_core.errors import UnknownModel
from headrace_core.served_model import ServedModel
from headrace_server.errors.mapping import ErrorResponse
from headrace_server.lora.served import ServedAdapter
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
            state = state_of(request)
            adapters = [] if state.adapters is None else await state.adapters.listed()
            served = cards(engine.model, state.created)
            return ModelList(data=[*served, *map(adapter_card, adapters)])

        @router.get("/v1/models/{name:path}", responses={404: {"model": ErrorResponse}})
        async def show_model(name: str, request: Request) -> ModelCard:
            state = state_of(request)
            if name in engine.model.names:
                return card(name, engine.model, state.created)
            adapters = [] if state.adapters is None else await state.adapters.listed()
            for adapter in adapters:
                if adapter.name == name:
                    return adapter_card(adapter)
            raise UnknownModel(f"model {name[:256]!r} is not served", param="model")

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


def adapter_card(adapter: ServedAdapter) -> ModelCard:
    """Entry of an adapter: its folder, and the name of its model."""
    state, request = adapter.state, adapter.request
    made = card(adapter.name, state.engine.model, adapter.created)
    made.root = request.lora_path
    made.parent = request.base_model_name or adapter.base_name
    made.max_model_len = None
    return made


ROUTER = ModelsRouter()
