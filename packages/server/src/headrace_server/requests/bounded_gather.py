"""Work on many items for one answer: some at a time, results in order, none left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def in_order(
    work: Callable[[int, T], Awaitable[R]], items: Sequence[T], at_once: int
) -> list[R]:
    """The results of ``work(position, item)``.

    The first error ends all others; so does cancelling.

    Args:
        at_once: at most so many run at a time.
    """
    results: dict[int, R] = {}
    waiting = iter(enumerate(items))

    async def run() -> None:
        for position, item in waiting:
            results[position] = await work(position, item)

    runners = [asyncio.create_task(run()) for _ in range(min(at_once, len(items)))]
    try:
        await asyncio.gather(*runners)
    finally:
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
    return [results[position] for position in range(len(items))]
