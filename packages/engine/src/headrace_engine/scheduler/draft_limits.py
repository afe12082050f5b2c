"""How many guesses a step may check for a request."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_engine.scheduler.request import SchedulerRequest

_SHARE = 4
"""One part in so many of a step's tokens is for guesses, at most: prompts need the others."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Room for guesses; how much of it is used is the worker's affair."""

    most: int
    """Guesses a request."""
    most_running: int | None = None
    """Running requests above which nothing is guessed; None: it always is."""

    def room(self, state: SchedulerRequest, budget: int, size: int, num_running: int) -> int:
        """Guesses for a request that lacks one token; all requests may have as many.

        Args:
            budget: tokens that the step may still take, that one included; one is left for each request
                behind.
            size: tokens that the step may hold in all.
            num_running: requests.
        """
        if self.most_running is not None and num_running > self.most_running:
            return 0
        if state.is_slow or state.request.pooling is not None:
            return 0
        left = state.max_num_tokens - state.num_tokens - 1
        return max(0, min(self.most, left, budget - num_running, size // (_SHARE * num_running)))
