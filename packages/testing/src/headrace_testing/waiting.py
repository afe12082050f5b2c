"""Waits of tests: for a condition, however long it takes. Their limit only ends a hang."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE = 60.0
"""Seconds after which something is said never to come; a machine may be busy."""
_PAUSE = 0.005


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE, what: str = "") -> None:
    """Look until the condition is true; an AssertionError that tells ``what`` where it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what or "the condition did not come true in time"
        time.sleep(_PAUSE)


async def until(
    condition: Callable[[], Awaitable[object] | object], seconds: float = PATIENCE, what: str = ""
) -> None:
    """The same for a coroutine; the condition may be one too."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                found = condition()
                if await found if inspect.isawaitable(found) else found:
                    return
                await asyncio.sleep(_PAUSE)
    except TimeoutError:
        raise AssertionError(what or "the condition did not come true in time") from None
