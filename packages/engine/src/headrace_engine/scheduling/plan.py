"""One step while it is being filled."""

from __future__ import annotations

from headrace_core.kv import BlockIds
from headrace_core.step import NewRequest, ScheduledStep
from headrace_engine.scheduling.request import InFlight, RequestState


class StepPlan:
    """The step's content so far, and the limits that the rest must keep.

    Args:
        budget: tokens that the step may still take.
        contended: several requests compete for the step, so that long prompts must share it.
    """

    def __init__(self, budget: int, *, contended: bool = False) -> None:
        self.size = budget
        """Tokens that it may hold in all."""
        self.budget = budget
        self.contended = contended
        self.num_prompt_tokens = 0
        """Tokens of prompts, or of what is computed again after a preemption."""
        self.num_partial = 0
        """Prompts that will still be incomplete after this step."""
        self.num_long_partial = 0
        self.num_preempted = 0
        self.num_encoder_tokens = 0
        """Encoder states that it computes."""
        self.entries: list[InFlight] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.new_requests: list[NewRequest] = []
        self.new_block_ids: dict[str, BlockIds] = {}

    def begin(self, state: RequestState, block_ids: BlockIds, num_computed_tokens: int) -> None:
        """Introduce a request that the worker does not hold; :meth:`add` says with how much."""
        self.new_requests.append(new_request(state, block_ids, num_computed_tokens))
        self.num_encoder_tokens += state.num_encoder_tokens

    def add(
        self, state: RequestState, num_tokens: int, long_threshold: int, *, held_back: bool = False
    ) -> None:
        """Count ``num_tokens`` of a request as computed by this step.

        Args:
            held_back: the step could hold more of it, but is to end there.
        """
        self.budget -= num_tokens
        self.num_prompt_tokens += num_tokens
        self.num_scheduled_tokens[state.request_id] = num_tokens
        state.num_computed_tokens += num_tokens
        state.num_steps_in_flight += 1
        remaining = len(state.all_token_ids) + state.num_placeholders - state.num_computed_tokens
        if remaining == 0:
            state.num_placeholders += 1
        else:
            self.num_partial += not held_back
            self.num_long_partial += 0 < long_threshold < remaining
        self.entries.append(InFlight(state, state.epoch, remaining == 0))

    def add_decode(self, state: RequestState) -> None:
        """:meth:`add` for the one token that a request lacks: it samples the next."""
        self.budget -= 1
        self.num_scheduled_tokens[state.request_id] = 1
        state.num_computed_tokens += 1
        state.num_steps_in_flight += 1
        state.num_placeholders += 1
        entry = state.decoding_entry
        if entry is None or entry[1] != state.epoch:
            entry = state.decoding_entry = InFlight(state, state.epoch, True)
        self.entries.append(entry)

    def extend(self, index: int, num_tokens: int, gained: BlockIds) -> None:
        """Count further tokens of the request at ``entries[index]``, which did not sample yet."""
        state, epoch, _ = self.entries[index]
        self.budget -= num_tokens
        self.num_scheduled_tokens[state.request_id] += num_tokens
        state.num_computed_tokens += num_tokens
        if state.num_computed_tokens == state.num_tokens:
            state.num_placeholders += 1
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

    def build(
        self, step_id: int, gone_request_ids: list[str], *, allows_late: bool = False
    ) -> ScheduledStep:
        return ScheduledStep(
            step_id=step_id,
            num_scheduled_tokens=self.num_scheduled_tokens,
            new_requests=self.new_requests,
            new_block_ids=self.new_block_ids,
            gone_request_ids=gone_request_ids,
            allows_late=allows_late,
        )


def new_request(state: RequestState, block_ids: BlockIds, num_computed_tokens: int) -> NewRequest:
    """What the worker must know of a request that it does not hold."""
    request = state.request
    return NewRequest(
        request_id=state.request_id,
        token_ids=list(state.all_token_ids),
        num_prompt_tokens=state.num_prompt_tokens,
        params=request.params,
        stop_token_ids=request.stop_token_ids,
        bad_words_token_ids=request.bad_words_token_ids,
        block_ids=block_ids,
        num_computed_tokens=num_computed_tokens,
        constraint=request.constraint,
        prompt_embeds=request.prompt_embeds,
        thinking=request.thinking,
        media=request.media,
        num_encoder_tokens=request.num_encoder_tokens,
        pooling=request.pooling,
        token_type_ids=request.token_type_ids,
        num_attended_tokens=request.num_attended_tokens,
    )
