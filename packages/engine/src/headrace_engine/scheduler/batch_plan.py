"""One step while it is being filled, and how large it may be."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_core.step import NewRequest, ScheduledStep
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.contract import BlockIds
from headrace_engine.scheduler.request import InFlight, SchedulerRequest
from headrace_engine.scheduler.request_tracker import RequestTracker


class BatchPlan:
    """The step's content so far, and the limits that the rest must keep.

    Args:
        budget: tokens that the step may still take.
        contended: several requests compete for the step, so that long prompts must share it.
        max_requests: most requests in the step.
    """

    def __init__(self, budget: int, *, contended: bool = False, max_requests: int) -> None:
        self.max_requests = max_requests
        self.size = budget
        """Tokens that it may hold in all."""
        self.budget = budget
        self.most_prompt_tokens = budget
        """Tokens of prompts that it may hold."""
        self.contended = contended
        self.num_prompt_tokens = 0
        """Tokens of prompts, or of what is computed again after a preemption."""
        self.delays_tokens = False
        """A request decodes that is not in it, as its next token is on its way: the one behind that waits for
        the end of this step."""
        self.num_partial = 0
        """Prompts that will still be incomplete after this step."""
        self.num_long_partial = 0
        self.num_preempted = 0
        self.num_encoder_tokens = 0
        """Encoder states that it computes."""
        self.num_media_vectors = 0
        """Vectors that it makes of media in prompts."""
        self.may_wait = False
        """Requests may be left out until their media are embedded, beside steps."""
        self.waits = False
        """One was."""
        self.entries: list[InFlight] = []
        """Parts of requests, but for those of the group."""
        self.num_in_order = 0
        """The first so many entries are in the order in which requests run."""
        self.num_grouped = 0
        """Requests that have one token as members of the group."""
        self.num_scheduled_tokens: dict[str, int] = {}
        self.shares_counts = False
        """True if other steps have that mapping, too."""
        self.num_drafts: dict[str, int] = {}
        self.new_requests: list[NewRequest] = []
        self.new_block_ids: dict[str, BlockIds] = {}

    @property
    def num_requests(self) -> int:
        """Requests in the step."""
        return len(self.entries) + self.num_grouped

    @property
    def prompt_budget(self) -> int:
        """Tokens of prompts that it may still take; none below 1."""
        return min(self.budget, self.most_prompt_tokens - self.num_prompt_tokens)

    def begin(self, state: SchedulerRequest, block_ids: BlockIds, num_computed_tokens: int) -> None:
        """Introduce a request that the worker does not hold; :meth:`add` says with how much."""
        self.new_requests.append(new_request(state, block_ids, num_computed_tokens))
        self.num_encoder_tokens += state.num_encoder_tokens

    def add(
        self,
        state: SchedulerRequest,
        num_tokens: int,
        long_threshold: int,
        *,
        held_back: bool = False,
    ) -> None:
        """Count ``num_tokens`` of a request, which is in no group, as computed by this step.

        Args:
            held_back: the step could hold more of it, but is to end there.
        """
        self.budget -= num_tokens
        self.num_prompt_tokens += num_tokens
        self._own_counts()[state.request_id] = num_tokens
        state.own_computed += num_tokens
        state.own_in_flight += 1
        remaining = len(state.own_token_ids) + state.own_placeholders - state.own_computed
        if remaining == 0:
            state.own_placeholders += 1
        else:
            self.num_partial += not held_back
            self.num_long_partial += 0 < long_threshold < remaining
        self.entries.append(InFlight(state, state.epoch, remaining == 0))

    def add_decode(self, state: SchedulerRequest, num_drafts: int = 0) -> None:
        """:meth:`add` for the one token that a request lacks: it samples the next.

        Args:
            num_drafts: guesses that may be checked besides.
        """
        self.budget -= 1
        self._own_counts()[state.request_id] = 1
        state.own_computed += 1
        state.own_in_flight += 1
        state.own_placeholders += 1
        entry = state.decoding_entry
        if entry is None or entry[1] != state.epoch or entry[3] != num_drafts:
            entry = state.decoding_entry = InFlight(state, state.epoch, True, num_drafts)
        self.entries.append(entry)
        if num_drafts:
            self.budget -= num_drafts
            self.num_drafts[state.request_id] = num_drafts
            state.own_computed += num_drafts
            state.own_placeholders += num_drafts
            state.num_drafts += num_drafts

    def add_group(self, num_members: int) -> None:
        """:meth:`add_decode` for all members of the group, which counts for them; there is room for each."""
        self.num_grouped = num_members
        self.budget -= num_members

    def add_quiet(self, states: Sequence[SchedulerRequest], start: int) -> int:
        """:meth:`add_decode` for requests one after another, as long as the step has room and nothing else
        happens to them (:attr:`SchedulerRequest.quiet_until`).

        Args:
            states: in the step's order.
            start: index of the first of them.

        Returns:
            Index of the first that is not added.
        """
        room = min(self.budget, self.max_requests - self.num_requests)
        end = min(start + room, len(states))
        scheduled, add_entry = self._own_counts(), self.entries.append
        for index in range(start, end):
            state = states[index]
            computed = state.own_computed
            if state.group is not None or (
                computed >= state.quiet_until
                and not (computed < state.quiet_until_known and state.own_placeholders)
            ):
                end = index
                break
            state.own_computed = computed + 1
            state.own_in_flight += 1
            state.own_placeholders += 1
            scheduled[state.request_id] = 1
            add_entry(state.decoding_entry)  # type: ignore[arg-type]  # add_decode has made it
        self.budget -= end - start
        return end

    def extend(self, index: int, num_tokens: int, gained: BlockIds) -> None:
        """Count further tokens of the request at ``entries[index]``, which did not sample yet."""
        state, epoch, *_ = self.entries[index]
        self.budget -= num_tokens
        self.num_prompt_tokens += num_tokens
        self._own_counts()[state.request_id] += num_tokens
        state.own_computed += num_tokens
        if state.own_computed == state.num_tokens:
            state.own_placeholders += 1
            self.entries[index] = InFlight(state, epoch, True)
        if not any(gained):
            return
        new = next((n for n in self.new_requests if n.request_id == state.request_id), None)
        known = new.block_ids if new is not None else self.new_block_ids.get(state.request_id)
        if known is None:
            self.new_block_ids[state.request_id] = gained
        else:
            for block_ids, more in zip(known, gained):
                block_ids.extend(more)

    def _own_counts(self) -> dict[str, int]:
        """The tokens by request, to be changed."""
        if self.shares_counts:
            self.num_scheduled_tokens = self.num_scheduled_tokens.copy()
            self.shares_counts = False
        return self.num_scheduled_tokens

    def build(
        self, step_id: int, gone_request_ids: list[str], *, allows_late: bool = False
    ) -> ScheduledStep:
        return ScheduledStep(
            step_id=step_id,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_drafts=self.num_drafts,
            new_requests=self.new_requests,
            new_block_ids=self.new_block_ids,
            gone_request_ids=gone_request_ids,
            allows_late=allows_late,
        )


def new_request(
    state: SchedulerRequest, block_ids: BlockIds, num_computed_tokens: int
) -> NewRequest:
    """A request that the worker does not hold, as it is now."""
    return NewRequest(state.request, list(state.all_token_ids), block_ids, num_computed_tokens)


class StepLimits:
    """Limits of a step's size, and of a prompt's part of it.

    Args:
        config: resolved (no None in the limits).
        fills_up: where prompts may not be cut, shorter ones behind take the room that is too small
            for the next: no output tokens compete for it, so whoever was passed over has the next
            step to itself.
        steps_beside: steps that run beside each other, in stages, and have no request in common whose next
            token is not known: requests are divided over so many.
    """

    def __init__(
        self, config: SchedulerConfig, *, fills_up: bool = False, steps_beside: int = 1
    ) -> None:
        self._fills_up = fills_up
        self.steps_beside = steps_beside
        self.max_seqs: int = config.max_num_seqs or 0
        """Most requests in a step."""
        self.long_threshold = config.long_prefill_token_threshold
        self.cuts_prompts = config.enable_chunked_prefill
        """True if a prompt may take several steps."""
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

    def plan(self, tracker: RequestTracker) -> BatchPlan:
        """An empty step for these requests."""
        return BatchPlan(
            self._budget(tracker),
            contended=self._is_contended(tracker),
            max_requests=self._share_of_requests(tracker),
        )

    def encodes(self, state: SchedulerRequest, plan: BatchPlan) -> bool:
        """True if a step has room for a request's encoder states: they cost about what as many tokens
        do, and come all at once. A step may always hold one request's."""
        total = plan.num_encoder_tokens + state.num_encoder_tokens
        return not plan.num_encoder_tokens or total <= self._max_tokens

    def admissible(self, remaining: int, plan: BatchPlan) -> int | None:
        """Number of a waiting request's tokens that may run: 0 = it must wait, and so must all
        behind it; None = it must wait, but shorter ones may overtake it."""
        if not self._config.enable_chunked_prefill:
            if remaining <= plan.budget:
                return remaining
            return None if self._fills_up else 0
        num_tokens = min(self.share(remaining, plan), plan.prompt_budget)
        if num_tokens < remaining:
            is_long = 0 < self.long_threshold < remaining
            if is_long and plan.num_long_partial >= self._config.max_long_partial_prefills:
                return None
            if plan.num_partial >= self._config.max_num_partial_prefills:
                return 0
        return num_tokens

    def share(self, remaining: int, plan: BatchPlan) -> int:
        """At most its share of the budget for a long prompt, if others could use the rest."""
        if plan.contended and remaining > self.long_threshold:
            return min(remaining, max(1, plan.size // self._config.max_num_partial_prefills))
        return remaining

    def _share_of_requests(self, tracker: RequestTracker) -> int:
        """Most requests in a step: where steps run beside each other, its part of those that could run."""
        if self.steps_beside == 1:
            return self.max_seqs
        could_run = min(self.max_seqs, len(tracker.running) + len(tracker.waiting))
        return max(1, -(-could_run // self.steps_beside))

    def _budget(self, tracker: RequestTracker) -> int:
        """Tokens of the next step. Where a step's time grows with them, a large one would let
        several prompts wait for each other, and decoding requests for all of them; a request that
        is alone loses nothing."""
        alone = len(tracker.requests) == 1
        return self._max_tokens if alone else min(self._max_tokens, self._shared_tokens)

    def _is_contended(self, tracker: RequestTracker) -> bool:
        if self._config.max_num_partial_prefills == 1 or not self.long_threshold:
            return False
        alone = tracker.running.outside  # others decode
        prefilling = sum(s.num_tokens - s.num_computed_tokens > 1 for s in alone)
        return prefilling + len(tracker.waiting) > 1
