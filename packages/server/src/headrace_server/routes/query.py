"""Query parameters of control routes: a misspelt one is refused, not passed over."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from headrace_core.errors import RequestError


async def check_query(request: Request) -> None:
    """A dependency of routes. Raises RequestError unless the route knows each parameter of the query."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = list(_known(route.dependant))
    for name in request.query_params:
        if name not in known:
            raise RequestError(
                f"query parameter {name!r:.80}: must be one of {', '.join(known)} for {route.path}",
                param=name[:80],
            )


def _known(dependant: Dependant) -> Iterator[str]:
    """Names of the query parameters of a route, and of what it depends on."""
    yield from (field.alias for field in dependant.query_params)
    for further in dependant.dependencies:
        yield from _known(further)
