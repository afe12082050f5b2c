"""Requests in front of a core: how many may wait there, and the gate that holds them while it is paused.

What exceeds the limits is refused, with advice when to come back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from headrace_core.engine import AdmissionTicket
from headrace_core.errors import QueueFull
from headrace_engine.config import SchedulerConfig
from headrace_engine.output_processing.output_processor import OutputProcessor

MAX_QUEUED_REQUESTS = 16384
"""Most waiting requests, if the configuration says nothing."""
MAX_RETRY_AFTER = 60.0
"""Longest advice to a caller whose request was refused, in seconds."""


class QueueLimits:
    """Limits of one engine's queue. Used on its event loop.

    Args:
        config: the limits.
        processor: knows what waits.
    """

    def __init__(self, config: SchedulerConfig, processor: OutputProcessor) -> None:
        self._max_requests = config.max_queued_requests or MAX_QUEUED_REQUESTS
        self._max_tokens = config.max_queued_tokens
        self._processor = processor
        self._num_arriving = 0

    @contextmanager
    def arriving(self, n: int) -> Iterator[None]:
        """Context in which a request of ``n`` completions is taken in. They count as waiting meanwhile:
        long prompts take a while, and a paused engine holds requests.

        Raises:
            QueueFull: too many wait; says how many, and when to try again.
        """
        self._check_requests(n)
        self._num_arriving += n
        try:
            yield
        finally:
            self._num_arriving -= n

    def share(self, wanted: int) -> int:
        """Number of ``wanted`` requests of one call that may be under way together: a call that was
        admitted does not fill the queue, which would have others refused."""
        return max(1, min(wanted, self._max_requests // 2))

    def check_tokens(self, own: int) -> None:
        """Refuse a request whose prompts, of ``own`` tokens, exceed the room that is left.

        Raises:
            QueueFull: says how many tokens wait, and when to try again.
        """
        limit, waiting = self._max_tokens, self._processor.num_waiting_tokens
        if limit is None or not waiting:
            return  # a request that finds nobody waiting is taken, however long: else it never could be
        excess = waiting + own - limit
        if excess > 0:
            raise QueueFull(
                f"prompts of {waiting} tokens wait already and {own} more would exceed "
                f"max_queued_tokens = {limit}",
                retry_after=_retry_after(
                    self._processor.seconds_until(num_tokens=min(excess, waiting))
                ),
            )

    def _check_requests(self, n: int) -> None:
        waiting = self._processor.num_waiting + self._num_arriving
        excess = waiting + n - self._max_requests
        if excess > 0:
            raise QueueFull(
                f"{waiting} completions wait already and {n} more would exceed "
                f"max_queued_requests = {self._max_requests}",
                retry_after=_retry_after(self._processor.seconds_until(num_starts=excess)),
            )


@asynccontextmanager
async def arriving(
    limits: QueueLimits, gate: PauseGate, num_requests: int, ticket: AdmissionTicket | None
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """See :meth:`headrace_engine.front.Waiting.arriving`."""

    async def admit(num_tokens: int) -> None:
        await gate.passed()
        limits.check_tokens(num_tokens)

    if ticket is None:
        with limits.arriving(num_requests):
            yield admit
        return
    async with ticket.lock:  # nobody waits long: once one was admitted, the others go on at once
        if not ticket.admitted:
            with limits.arriving(num_requests):
                yield admit
            ticket.admitted = True
            return
    yield lambda _: gate.passed()


def _retry_after(seconds: float) -> float:
    return min(MAX_RETRY_AFTER, max(1.0, math.ceil(seconds)))


class PauseGate:
    """The gate in front of a paused engine: requests wait behind it. Open at first; belongs to one event
    loop, from the first wait on."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._paused = False
        self.num_held = 0
        """Requests that wait here."""

    @property
    def paused(self) -> bool:
        """True if the gate was closed last."""
        return self._paused

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self._paused = True
        self._open.clear()

    def open(self) -> None:
        """Let everybody through."""
        self._paused = False
        self._open.set()

    def give_up(self) -> None:
        """Let everybody through without opening: the engine has stopped, and says so to them."""
        self._open.set()

    async def passed(self) -> None:
        """Return at once if the gate is open, else when it opens."""
        if self._open.is_set():
            return
        self.num_held += 1
        try:
            await self._open.wait()
        finally:
            self.num_held -= 1
