"""How much may wait in front of a core; more is refused, with advice when to come back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from headrace_core.config import SchedulerConfig
from headrace_core.errors import QueueFull
from headrace_engine.emission.processor import OutputProcessor

MAX_RETRY_AFTER = 60.0
"""Longest advice to a caller whose request was refused, in seconds."""


class QueueLimits:
    """The limits of one engine's queue. Used on its event loop.

    Args:
        config: the limits.
        processor: knows what waits.
    """

    def __init__(self, config: SchedulerConfig, processor: OutputProcessor) -> None:
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._processor = processor
        self._num_arriving = 0

    @contextmanager
    def arriving(self, n: int) -> Iterator[None]:
        """Around taking in a request of ``n`` completions, which count as waiting meanwhile: long
        prompts take a while, and a paused engine holds requests.

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
        """Of ``wanted`` requests of one call, how many may be under way together: a call that was let
        in does not fill the queue, which would have others refused."""
        return max(1, min(wanted, self._max_requests // 2))

    def check_tokens(self, own: int) -> None:
        """Refuse a request whose prompts, of ``own`` tokens, are too long for what there is room for.

        Raises:
            QueueFull: says how many tokens wait, and when to try again.
        """
        limit, waiting = self._max_tokens, self._processor.num_waiting_tokens
        if limit is None or not waiting:
            return  # who finds nobody waiting is taken, however long: it could never be otherwise
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


def _retry_after(seconds: float) -> float:
    return min(MAX_RETRY_AFTER, max(1.0, math.ceil(seconds)))
