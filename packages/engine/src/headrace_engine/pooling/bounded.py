"""Many awaitables, few at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")


async def run_bounded(
    work: Iterator[Coroutine[Any, Any, Result]], at_once: int, take: Callable[[int, Result], object]
) -> None:
    """Run coroutines, taken from the iterator as others end.

    Args:
        at_once: most that run side by side.
        take: gets (index, result) of each, in the order in which they are ready.

    Raises: what the first that fails raises; the others are cancelled and waited for.
    """
    numbered = enumerate(work)
    running: dict[asyncio.Task[Result], int] = {}
    try:
        while True:
            for index, coroutine in itertools.islice(numbered, at_once - len(running)):
                running[asyncio.create_task(coroutine)] = index
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                result = task.result()
                take(running.pop(task), result)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
