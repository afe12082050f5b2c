"""``?model=NAME`` of routes whose requests have no body that could name a model."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from headrace_server.requests.convert import check_model
from headrace_server.state import state_of


async def check_named(
    request: Request,
    model: Annotated[
        str | None,
        Query(
            max_length=1024,
            description="Served model name; required if the server has several models.",
        ),
    ] = None,
) -> None:
    """A dependency of routes. Raises UnknownModel unless the query names a served model, or none."""
    check_model(model, state_of(request).engine.model)
