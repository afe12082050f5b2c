"""More or fewer data-parallel engines while the server runs.

Part of the control routes (:mod:`headrace_server.routes.control`).
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from headrace_core.engine import EngineClient
from headrace_core.errors import GenerateError
from headrace_server.errors.mapping import ErrorAnswer, ErrorResponse, report_named
from headrace_server.http.routing import ERROR_RESPONSES
from headrace_server.state import state_of
from headrace_server.streaming.event_stream import wait_watching

_RESPONSES: dict[int | str, dict[str, Any]] = {
    **ERROR_RESPONSES,
    409: {"model": ErrorResponse, "description": "The engines are being scaled already."},
}


class ScaleBody(BaseModel):
    """Body of ``POST /scale_elastic_ep``."""

    model_config = ConfigDict(extra="forbid")

    new_data_parallel_size: Annotated[int, Field(gt=0, strict=True)] = Field(
        description="Engines that there are to be. Those with the highest numbers come and go."
    )
    drain_timeout: Annotated[float, Field(ge=0, le=86_400)] = Field(
        300.0,
        description="Seconds that requests have to end in engines that leave; then they end with an error.",
    )
    refuse_requests: bool = Field(
        False,
        description="Answer requests that come meanwhile with a 503, instead of giving them to the engines "
        "that stay.",
    )


class Scaled(BaseModel):
    """Answer of ``POST /scale_elastic_ep``."""

    message: str
    data_parallel_size: int
    num_ended_requests: int
    """Requests that had not ended within ``drain_timeout``, and were ended with an error."""


class ScalingStatus(BaseModel):
    """Answer of ``/is_scaling_elastic_ep``."""

    is_scaling_elastic_ep: bool


def add_routes(router: APIRouter, engine: EngineClient) -> None:
    """Add the routes to those of control."""

    @router.post("/scale_elastic_ep", response_model=Scaled, responses=_RESPONSES)
    async def scale_elastic_ep(request: Request, body: ScaleBody) -> Scaled | Response:
        """Start further engines, or have some end their requests and leave; answered once that is done. The
        others serve meanwhile. If a new engine does not start, the old number stays, and the answer says why.
        A client that leaves ends nothing."""
        state, size = state_of(request), body.new_data_parallel_size
        if state.scaling.is_under_way:
            return ErrorAnswer(
                409, f"the engines are being scaled to {state.scaling.num_engines} already"
            ).response()
        task = state.scaling.begin(
            engine.scale_elastic_ep(size, body.drain_timeout),
            size,
            refuses_requests=body.refuse_requests,
        )
        name = request.scope["headrace_request_id"]
        try:
            ended = await wait_watching(_shielded(task), request, state.lifecycle, name)
        except GenerateError as error:
            return report_named(error, name).response()
        return Scaled(
            message=f"Scaled to {size} data parallel engines",
            data_parallel_size=size,
            num_ended_requests=ended,
        )

    for method in ("GET", "POST"):  # clients of vLLM ask by POST

        @router.api_route("/is_scaling_elastic_ep", methods=[method])
        async def is_scaling_elastic_ep(request: Request) -> ScalingStatus:
            """Show whether engines come or go now."""
            return ScalingStatus(is_scaling_elastic_ep=state_of(request).scaling.is_under_way)


async def _shielded(task: asyncio.Task[int]) -> int:
    return await asyncio.shield(task)
