"""The event loop may not be held up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

TICK = 0.01
"""Seconds between looks."""


@dataclass
class LoopLag:
    """Lateness of the event loop."""

    limit: float = 0.1
    """Longest lag allowed at the end of the block, in seconds; a test may change it."""
    lags: list[float] = field(default_factory=list)
    """Seconds beyond each tick."""

    @property
    def worst(self) -> float:
        """Seconds."""
        return max(self.lags, default=0.0)

    def quantile(self, share: float) -> float:
        """Seconds that the given share of the looks was not later than."""
        ordered = sorted(self.lags)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@asynccontextmanager
async def guarded_loop(limit: float = 0.1) -> AsyncIterator[LoopLag]:
    """Fail with an AssertionError if the running loop was held up for longer than ``limit``."""
    lag = LoopLag(limit)
    watching = asyncio.create_task(_watch(lag))
    try:
        yield lag
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    assert lag.worst <= lag.limit, (
        f"the event loop was held up for {lag.worst * 1000:.0f} ms "
        f"(limit {lag.limit * 1000:.0f} ms)"
    )


async def _watch(lag: LoopLag) -> None:
    due = time.monotonic() + TICK
    while True:
        await asyncio.sleep(TICK)
        now = time.monotonic()
        lag.lags.append(max(0.0, now - due))
        due = now + TICK
