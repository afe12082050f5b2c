"""Paths that get no line in the access log (``--disable-access-log-for-endpoints``)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

ACCESS_LOGGER = "uvicorn.access"


@contextmanager
def quiet_access_log(paths: Collection[str]) -> Iterator[None]:
    """Leave these paths out of the access log for the time of the block."""
    if not paths:
        yield
        return
    chosen = frozenset(paths)

    def is_shown(record: logging.LogRecord) -> bool:
        # uvicorn's arguments: client, method, path with query, HTTP version, status.
        args = record.args
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        return str(args[2]).partition("?")[0] not in chosen

    logger = logging.getLogger(ACCESS_LOGGER)
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
