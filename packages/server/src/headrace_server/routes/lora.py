"""``POST /v1/load_lora_adapter`` and ``POST /v1/unload_lora_adapter``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.errors.mapping import ErrorResponse
from headrace_server.http.routing import json_router
from headrace_server.lora.served import ServedAdapters
from headrace_server.state import state_of


class LoadAdapter(BaseModel):
    """Body of ``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Annotated[str, Field(min_length=1, max_length=1024)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder of ``adapter_config.json`` and the weights, on the server's machine."""
    load_inplace: bool = False
    """Replace a loaded adapter of that name: new requests have the new one, those under way go on."""


class UnloadAdapter(BaseModel):
    """Body of ``POST /v1/unload_lora_adapter``: name or id, or both."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    lora_int_id: Annotated[int | None, Field(ge=1, lt=2**53)] = None


def build() -> APIRouter:
    """The two routes."""
    router = json_router()
    router.tags.append("control")
    unknown = {"model": ErrorResponse, "description": "There is no such adapter."}

    @router.post(
        "/v1/load_lora_adapter", response_class=PlainTextResponse, responses={404: unknown}
    )
    async def load(body: LoadAdapter, request: Request) -> PlainTextResponse:
        """Read an adapter and serve it under a name."""
        adapters = _adapters_of(request)
        name = body.lora_name
        await adapters.load_allowed(name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully")

    @router.post(
        "/v1/unload_lora_adapter", response_class=PlainTextResponse, responses={404: unknown}
    )
    async def unload(body: UnloadAdapter, request: Request) -> PlainTextResponse:
        """Serve an adapter no longer; requests under way go on."""
        adapters = _adapters_of(request)
        if body.lora_name is None and body.lora_int_id is None:
            raise RequestError("lora_name: must be given, or lora_int_id", param="lora_name")
        adapter = await adapters.unload(body.lora_name, body.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully")

    return router


def _adapters_of(request: Request) -> ServedAdapters:
    adapters = state_of(request).adapters
    if adapters is None:
        raise UnsupportedFeature("this engine takes no adapters; start it with --enable-lora")
    return adapters
