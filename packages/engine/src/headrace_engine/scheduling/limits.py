"""How large a step may be, and how much of it a prompt may take."""

from __future__ import annotations

from headrace_core.config import SchedulerConfig
from headrace_engine.scheduling.plan import StepPlan
from headrace_engine.scheduling.request import RequestState
from headrace_engine.scheduling.roster import Roster


class StepLimits:
    """The limits of a configuration.

    Args:
        config: resolved (no None in the limits).
        fills_up: where prompts may not be cut, shorter ones behind take the room that is too small
            for the next: no output tokens compete for it, so whoever was passed over has the next
            step to itself.
    """

    def __init__(self, config: SchedulerConfig, *, fills_up: bool = False) -> None:
        self._fills_up = fills_up
        self.max_seqs: int = config.max_num_seqs or 0
        """Most requests in a step."""
        self.long_threshold = config.long_prefill_token_threshold
        self.cuts_prompts = config.enable_chunked_prefill
        """Whether a prompt may take several steps."""
        self._config = config
        self._max_tokens: int = config.max_num_batched_tokens or 0
        shared = max(config.max_num_shared_tokens or self._max_tokens, self.max_seqs)
        # Whole prompts must fit into a step where they may not be cut.
        self._shared_tokens = shared if config.enable_chunked_prefill else self._max_tokens
        # Where steps are to be small, a step that holds this much of prompts begins no further one:
        # it would only delay the first tokens of those that it holds (ADR 0017).
        tight = self._shared_tokens < self._max_tokens
        half = max(self._shared_tokens // 2, self.max_seqs)
        self.enough_prompt = half if tight else self._max_tokens
        """Tokens of prompts in a step from which on it begins no further one."""

    def plan(self, roster: Roster) -> StepPlan:
        """An empty step for these requests."""
        return StepPlan(self._budget(roster), contended=self._is_contended(roster))

    def encodes(self, state: RequestState, plan: StepPlan) -> bool:
        """Whether a step has room for a request's encoder states: they cost about what as many tokens
        do, and come all at once. A step may always hold one request's."""
        total = plan.num_encoder_tokens + state.num_encoder_tokens
        return not plan.num_encoder_tokens or total <= self._max_tokens

    def admissible(self, remaining: int, plan: StepPlan) -> int | None:
        """How many of a waiting request's tokens may run: 0 = it must wait, and so must all
        behind it; None = it must wait, but shorter ones may overtake it."""
        if not self._config.enable_chunked_prefill:
            if remaining <= plan.budget:
                return remaining
            return None if self._fills_up else 0
        num_tokens = min(self.share(remaining, plan), plan.budget)
        if num_tokens < remaining:
            is_long = 0 < self.long_threshold < remaining
            if is_long and plan.num_long_partial >= self._config.max_long_partial_prefills:
                return None
            if plan.num_partial >= self._config.max_num_partial_prefills:
                return 0
        return num_tokens

    def share(self, remaining: int, plan: StepPlan) -> int:
        """At most its share of the budget for a long prompt, if others could use the rest."""
        if plan.contended and remaining > self.long_threshold:
            return min(remaining, max(1, plan.size // self._config.max_num_partial_prefills))
        return remaining

    def _budget(self, roster: Roster) -> int:
        """Tokens of the next step. Where a step's time grows with them, a large one would let
        several prompts wait for each other, and decoding requests for all of them; a request that
        is alone loses nothing."""
        alone = len(roster.requests) == 1
        return self._max_tokens if alone else min(self._max_tokens, self._shared_tokens)

    def _is_contended(self, roster: Roster) -> bool:
        if self._config.max_num_partial_prefills == 1 or not self.long_threshold:
            return False
        prefilling = sum(s.num_tokens - s.num_computed_tokens > 1 for s in roster.running)
        return prefilling + len(roster.waiting) > 1
