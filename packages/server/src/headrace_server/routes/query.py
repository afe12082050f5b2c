"""Query parameters of control routes: a misspelt one is refused, not passed over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args, get_origin

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from headrace_core.errors import RequestError


async def check_query(request: Request) -> None:
    """A dependency of routes. Raises RequestError unless the route knows each parameter of the query, and
    none that is no list comes twice: which one counts would be a guess."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = dict(_known(route.dependant))
    for name in request.query_params:
        if name not in known:
            raise RequestError(
                f"query parameter {name!r:.80}: must be one of {', '.join(known)} for {route.path}",
                param=name[:80],
            )
        given = request.query_params.getlist(name)
        if len(given) > 1 and not known[name]:
            raise RequestError(
                f"query parameter {name!r}: must be given once for {route.path}, is given {len(given)} times",
                param=name,
            )


def _known(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Names of the query parameters of a route, and of what it depends on, and whether each is a list."""
    for field in dependant.query_params:
        form = field.field_info.annotation
        yield field.alias, any(get_origin(one) is list for one in (form, *get_args(form)))
    for further in dependant.dependencies:
        yield from _known(further)
