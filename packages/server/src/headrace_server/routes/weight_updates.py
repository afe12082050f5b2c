"""New weights for the running engine, from a trainer in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from headrace_core.engine import EngineClient
from headrace_core.errors import CapacityError
from headrace_server.api_processes import all_processes
from headrace_server.errors.mapping import report_named
from headrace_server.http.routing import ERROR_RESPONSES
from headrace_server.state import ServerState, state_of

UPDATE, JOIN = "update_weights", "init_weight_update_group"
UPDATE_TIMEOUT = 3600.0
"""Longest wait for weights to come and to be packed, in seconds."""
_EMPTY: dict[int | str, dict[str, Any]] = {**ERROR_RESPONSES, 200: {"content": {}}}


class NewTensor(BaseModel):
    """A tensor that is to come."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    dtype: Annotated[str, Field(max_length=32)]
    shape: Annotated[list[int], Field(max_length=8)]
    offset: Annotated[int, Field(ge=0)] = 0
    """In bytes, from the beginning of the shared memory."""


class NewWeights(BaseModel):
    """Body of ``POST /update_weights``: a part of an update, or its end."""

    model_config = ConfigDict(extra="forbid")

    source: Literal["shared_memory", "broadcast", "stream"] | None = None
    """The way on which tensors come; null: no further ones."""
    shared_memory: Annotated[str, Field(max_length=255)] = ""
    """The segment's name."""
    tensors: Annotated[list[NewTensor], Field(max_length=1 << 20)] = []
    target: Literal["model", "draft"] = "model"
    """For whom the tensors are; draft: the model or head that guesses."""
    finish: bool = True
    """Put in what has come; false: further parts come."""
    mode: Literal["keep", "wait", "abort"] | None = None
    """With requests that run; null: they are an error."""
    version: Annotated[str | None, Field(max_length=128)] = None
    """Name of the new weights; null: the one before, counted up."""
    cancel: bool = False
    """Forget the parts that came."""


class WeightsTaken(BaseModel):
    """Answer of ``POST /update_weights``."""

    num_tensors: int = 0
    """Tensors of the update so far."""
    finished: bool = False
    """They compute now."""
    weights_version: str = ""


class WeightGroup(BaseModel):
    """Body of ``POST /init_weight_update_group``."""

    model_config = ConfigDict(extra="forbid")

    master_address: Annotated[str, Field(max_length=255)]
    master_port: int
    rank_offset: int = 1
    """Rank of the engine's first worker; the trainer has rank 0."""
    world_size: int = 2


class WeightStream(BaseModel):
    """Answer of ``POST /open_weight_stream``."""

    host: str
    port: int
    token: str


def add_routes(router: APIRouter, engine: EngineClient) -> None:
    """Add the routes to those that are behind the key."""

    @router.post("/update_weights", response_model=WeightsTaken, responses=ERROR_RESPONSES)
    async def update_weights(request: Request, body: NewWeights) -> WeightsTaken | Response:
        """Give the model new weights, or a part of them. If there is no memory for them, the answer says
        so."""
        if body.cancel:
            await engine.collective_rpc(UPDATE, args=[{"cancel": True}])
            return WeightsTaken()
        try:
            return WeightsTaken(**await _update(engine, state_of(request), body))
        except CapacityError as error:
            return report_named(error, request.scope["headrace_request_id"]).response()

    @router.post("/init_weight_update_group", response_class=Response, responses=_EMPTY)
    async def init_weight_update_group(body: WeightGroup) -> Response:
        """Join a trainer's group, whose rank 0 waits at an address."""
        args = [body.master_address, body.master_port, body.rank_offset, body.world_size]
        await engine.collective_rpc(JOIN, args=args, timeout=UPDATE_TIMEOUT)
        return Response()

    @router.post("/open_weight_stream", responses=ERROR_RESPONSES)
    async def open_weight_stream() -> WeightStream:
        """Listen for a trainer's stream, at the loopback address of the engine's machine."""
        return WeightStream(**(await engine.collective_rpc("open_weight_stream"))[0])

    @router.post("/close_weight_transfer", response_class=Response, responses=_EMPTY)
    async def close_weight_transfer() -> Response:
        """Leave a trainer's group, and close the stream."""
        await engine.collective_rpc("close_weight_transfer")
        return Response()


async def _update(engine: EngineClient, state: ServerState, body: NewWeights) -> dict[str, Any]:
    async def call(arguments: Mapping[str, Any]) -> dict[str, Any]:
        called = engine.collective_rpc(UPDATE, args=[arguments], timeout=UPDATE_TIMEOUT)
        return dict((await called)[0])

    last = {"finish": True, "keep_requests": body.mode == "keep", "version": body.version}
    pauses = body.finish and body.mode in ("wait", "abort") and not await engine.is_paused()
    part = body.model_dump(include={"source", "shared_memory", "tensors", "target"})
    # Nothing pauses, nor is aborted, for an update that is not whole.
    taken = await call({**part, **last, "finish": body.finish and not pauses, "prepare": pauses})
    if not pauses:
        return taken
    # Tensors came while requests ran; the pause is for putting them in.
    try:
        await all_processes.pause(state, wait=body.mode == "wait", clear_cache=True)
        return await call(last)
    except BaseException:
        if taken["began"]:
            await engine.collective_rpc(UPDATE, args=[{"cancel": True}])
        raise
    finally:
        await all_processes.resume(state)
