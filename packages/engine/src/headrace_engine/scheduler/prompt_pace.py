"""Prompt tokens that a step may take so that requests which decode get their next token in time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from headrace_engine.scheduler.batch_plan import BatchPlan
from headrace_engine.scheduler.step_time import StepTimeModel

logger = logging.getLogger(__name__)

LEAST_PROMPT_TOKENS = 16
"""Prompts get so many tokens of a step, whatever it takes (about a block of the cache): they never starve."""
STEPS_BEFORE_WARNING = 20
"""Steps one after another without time for prompts, before that is said."""


class _ScheduledWork(NamedTuple):
    """A step in flight."""

    num_decoding: int
    num_prompt: int
    began: float
    """Time at which it was scheduled."""
    is_typical: bool
    """Its time says something of others'."""


class PromptPace:
    """Keeps steps that hold decoding requests within a target, by the times of the steps before.

    A step's time is from the end of the one before it, or from its scheduling if nothing ran then, to its own
    end: what a stream waits for its next token, and not the model's pass alone.

    Args:
        target: seconds that a step with decoding requests should take at most (``target_itl``).
        clock: monotonic seconds.
        steps_beside: steps that run beside each other, in stages.
    """

    def __init__(self, target: float, clock: Callable[[], float], *, steps_beside: int = 1) -> None:
        self._target = target
        self._clock = clock
        self._times = StepTimeModel()
        self._in_flight: deque[_ScheduledWork] = deque()
        self._ends: deque[float] = deque(maxlen=steps_beside)
        """Ends of the last steps: the first of them made room for the step that ends next."""
        self._num_late = 0
        self._has_warned = False

    def most_prompt_tokens(self, num_decoding: int) -> int:
        """Tokens of prompts for a step.

        Args:
            num_decoding: its other tokens.
        """
        self._notice(num_decoding)
        found = self._times.prompt_tokens_within(self._target, num_decoding)
        return max(LEAST_PROMPT_TOKENS, found)

    def scheduled(self, plan: BatchPlan) -> None:
        """A step is in flight from now on."""
        num_prompt = plan.num_prompt_tokens
        encodes = plan.num_media_vectors or plan.num_encoder_tokens
        self._in_flight.append(
            _ScheduledWork(
                plan.size - plan.budget - num_prompt,
                num_prompt,
                self._clock(),
                is_typical=plan.num_requests > 0 and not encodes,
            )
        )

    def ended(self, *, failed: bool = False) -> None:
        """The oldest step in flight has ended."""
        work, now = self._in_flight.popleft(), self._clock()
        began = work.began
        if len(self._ends) == self._ends.maxlen:
            began = max(began, self._ends[0])
        self._ends.append(now)
        if work.is_typical and not failed:
            self._times.record(now - began, work.num_decoding, work.num_prompt)

    def _notice(self, num_decoding: int) -> None:
        """Say once that the target cannot be kept."""
        plain = self._times.plain(num_decoding)
        if plain < self._target or self._has_warned:
            self._num_late = 0
            return
        self._num_late += 1
        if self._num_late == STEPS_BEFORE_WARNING:
            self._has_warned = True
            logger.warning(
                "target_itl = %g: a step of %d tokens takes %.3g s without prompts; prompts get %d tokens a "
                "step",
                self._target, num_decoding, plain, LEAST_PROMPT_TOKENS,
            )  # fmt: skip
