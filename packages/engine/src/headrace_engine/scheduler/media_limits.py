"""Where a step may end within a prompt with media.

Tokens that see later ones of the same image (Gemma 3) are computed in one step, and so is each item where
``disable_chunked_mm_input`` asks for it. A step that reaches an item encodes all of it: how many vectors a
step makes is bounded, so that nobody's next token waits for several images.
"""

from __future__ import annotations

from headrace_core.request import CoreRequest
from headrace_engine.config import SchedulerConfig
from headrace_engine.scheduler.batch_plan import BatchPlan
from headrace_engine.scheduler.media_ahead import MediaAhead
from headrace_engine.scheduler.request import SchedulerRequest
from headrace_engine.whole_spans import Span, check_spans, uncut_spans


class MediaLimits:
    """Args:
    config: resolved (no None in the limits of tokens).
    ahead: what is embedded beside steps.
    """

    def __init__(self, config: SchedulerConfig, ahead: MediaAhead) -> None:
        self.ahead = ahead
        self._whole_items = config.disable_chunked_mm_input
        self._most_vectors = config.max_num_encoder_input_tokens
        self._max_tokens: int = config.max_num_batched_tokens or 0

    def check(self, request: CoreRequest) -> None:
        """Raises: RequestError if a part of the prompt that must not be cut fits into no step."""
        check_spans(self._spans(request), self._max_tokens)

    def cut(self, state: SchedulerRequest, start: int, num_tokens: int, plan: BatchPlan) -> int:
        """Number of a request's tokens from ``start`` on that a step takes.

        Args:
            num_tokens: so many fit, and are wanted.

        Returns:
            ``num_tokens``, or fewer; or more, where a part must not be cut and the largest step has room.
            0: the request must wait for the next step.
        """
        if not state.request.media or start >= state.num_prompt_tokens:
            return num_tokens
        end = self._end_of_encoding(state, start, start + num_tokens, plan)
        room = self._max_tokens - (plan.size - plan.budget)
        for first, last in self._spans(state.request):
            if not first < end < last:
                continue
            if first > start:
                return first - start
            return last - start if last - start <= room else 0
        return end - start

    def num_vectors(self, state: SchedulerRequest, start: int, num_tokens: int) -> int:
        """Vectors that a step makes which computes so many tokens from ``start`` on."""
        if start >= state.num_prompt_tokens:
            return 0
        end = start + num_tokens
        return sum(item.num_vectors for item in state.media if start <= item.offset < end)

    def waits(self, state: SchedulerRequest, start: int, plan: BatchPlan) -> bool:
        """Whether a request that does not run yet waits for vectors of its media from token ``start`` on,
        which are made beside steps."""
        if start >= state.num_prompt_tokens or not self._may_wait(state, plan):
            return False
        missing = [self.ahead.lacks(item) for item in state.media if item.offset >= start]
        plan.waits = plan.waits or any(missing)
        return any(missing)

    def _may_wait(self, state: SchedulerRequest, plan: BatchPlan) -> bool:
        """Whether one may wait for its media now. What is made beside steps is made without adapters."""
        own = state.adapter is not None and state.adapter.changes_media
        return plan.may_wait and not own and self.ahead.applies

    def _end_of_encoding(
        self, state: SchedulerRequest, start: int, end: int, plan: BatchPlan
    ) -> int:
        """``end``, or the first token of the item that the step has no vectors left for. A step may
        always make one item's."""
        made, most = plan.num_media_vectors, self._most_vectors or plan.size
        for item in state.media:
            if not start <= item.offset < end:
                continue
            if self._may_wait(state, plan) and self.ahead.lacks(item):
                plan.waits = True
                return item.offset
            if made and made + item.num_vectors > most:
                return item.offset
            made += item.num_vectors
        return end

    def _spans(self, request: CoreRequest) -> list[Span]:
        return uncut_spans(request.whole_spans, request.media, whole_items=self._whole_items)
