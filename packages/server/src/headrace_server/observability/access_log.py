"""Filters of uvicorn's log: chosen paths, keys in queries, and its own start and end are left out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote_plus

ACCESS_LOGGER = "uvicorn.access"
ASGI_LOGGER = "uvicorn.asgi"
"""Writes whole scopes, at level trace."""
LIFECYCLE_LOGGER = "uvicorn.error"
"""Writes of the server's start and end too, whatever the name says."""
HIDDEN = "***"
_SECRET = re.compile("key|token|secret|passw|auth|credential|sig", re.IGNORECASE)
"""Matches names of query parameters whose values are hidden: clients send keys there, though this server
reads none."""
_SEPARATORS = re.compile("([&;])")


def without_keys(query: str) -> str:
    """A query string whose values are hidden where their names say that they may be secret."""
    return "".join(map(_shown, _SEPARATORS.split(query)))


def _shown(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    return f"{name}={HIDDEN}" if equals and _SECRET.search(unquote_plus(name)) else pair


@contextmanager
def careful_access_log(paths: Collection[str]) -> Iterator[None]:
    """For the time of the block, leave these paths out of the access log, and keys out of all lines."""
    chosen = frozenset(paths)

    def look_at_line(record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status.
        args = record.args
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        path, mark, query = str(args[2]).partition("?")
        if mark:
            record.args = (*args[:2], path + mark + without_keys(query), *args[3:])
        return path not in chosen

    with _filtered(ACCESS_LOGGER, look_at_line), _filtered(ASGI_LOGGER, _look_at_scope):
        yield


@contextmanager
def quiet_lifecycle_log(level: str) -> Iterator[None]:
    """Leave out, for the time of the block, what uvicorn says of its own start and end: headrace says
    both. At DEBUG, of this package or of uvicorn, all is shown.

    Args:
        level: uvicorn's, as the operator chose it.
    """
    own = logging.getLogger(__name__)

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or own.isEnabledFor(logging.DEBUG)

    if level in ("debug", "trace"):
        yield
        return
    with _filtered(LIFECYCLE_LOGGER, is_shown):
        yield


@contextmanager
def _filtered(name: str, is_shown: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    logger = logging.getLogger(name)
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def _look_at_scope(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_careful, record.args))
    elif isinstance(record.args, Mapping):  # as logging turns a single one
        record.args = _careful(record.args)
    return True


def _careful(value: Any) -> Any:
    query = value.get("query_string") if isinstance(value, Mapping) else None
    if not query:
        return value
    return {**value, "query_string": without_keys(query.decode("latin-1")).encode("latin-1")}
