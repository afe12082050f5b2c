"""Fills steps: running requests first, then waiting ones, or one suspect alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from headrace_core import failpoints
from headrace_core.kv import BlockIds, KVCacheManager, PrefixMatch
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduling.limits import StepLimits
from headrace_engine.scheduling.plan import StepPlan
from headrace_engine.scheduling.request import RequestState, RequestStatus
from headrace_engine.scheduling.roster import Roster

logger = logging.getLogger(__name__)


class StepFiller:
    """Decides who takes part in a step, with how many tokens.

    Args:
        roster: whom there is to choose from.
        kv: hands out blocks.
        limits: of steps.
    """

    def __init__(self, roster: Roster, kv: KVCacheManager, limits: StepLimits) -> None:
        self._roster = roster
        self._kv = kv
        self._limits = limits
        self.suspects: list[RequestState] = []
        """To be computed alone, in this order; see :mod:`headrace_engine.scheduling.scheduler`."""
        self._refused: list[CoreOutput] = []
        """Of requests that ended while a step was filled."""

    def fill(self) -> StepPlan:
        """The next step; without entries if nothing can run now."""
        plan = self._limits.plan(self._roster)
        while not plan.entries and (suspect := self._next_suspect()) is not None:
            try:
                self._schedule_suspect(suspect, plan)
            except Exception as error:
                self._refuse(suspect, error)
        if not plan.entries:
            self._fill(plan)
        return plan

    def take_refused(self) -> list[CoreOutput]:
        """Outputs of requests that :meth:`fill` ended, each once: they raised an error."""
        refused, self._refused = self._refused, []
        return refused

    def suspect(self, states: Iterable[RequestState]) -> None:
        """Compute these one by one from now on."""
        self.suspects += [state for state in states if state not in self.suspects]

    def clear(self, state: RequestState) -> None:
        """A request has yielded a token: it can be computed."""
        if self.suspects and state in self.suspects:
            self.suspects.remove(state)

    def _fill(self, plan: StepPlan) -> None:
        self._schedule_running(plan)
        # After a preemption the pool is exhausted: admitting now would only thrash.
        if not plan.num_preempted:
            self._schedule_waiting(plan)
            if plan.contended:
                self._use_rest(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        index, running = 0, self._roster.running
        allocate = self._kv.allocate if failpoints.PLAN is None else self._allocate
        while index < len(running) and plan.budget > 0:
            state = running[index]
            index += 1
            num_tokens = len(state.all_token_ids) + state.num_placeholders
            if num_tokens >= state.max_num_tokens:
                continue  # the steps in flight bring it to its end
            if state.is_slow and state.num_placeholders:
                continue  # its next token takes long: a step with it might have to wait
            num_tokens -= state.num_computed_tokens
            decodes, most = num_tokens == 1, num_tokens
            if not decodes:
                most = min(self._limits.share(num_tokens, plan), plan.budget)
                num_tokens = self._to_snapshot(state, state.num_computed_tokens, most)
            try:
                gained = allocate(state, num_tokens)
                if gained is None:
                    gained = self._preempt_for(state, num_tokens, plan)
            except Exception as error:
                index -= 1
                self._refuse(state, error)
                continue
            if gained is None:
                break
            if decodes:
                plan.add_decode(state)
            else:
                plan.add(
                    state, num_tokens, self._limits.long_threshold, held_back=num_tokens < most
                )
            if any(gained):
                plan.new_block_ids[state.request_id] = gained

    def _to_snapshot(self, state: RequestState, computed: int, num_tokens: int) -> int:
        """So many of ``num_tokens`` further tokens that a state which other requests may begin from is
        not passed by."""
        if not self._limits.cuts_prompts:
            return num_tokens
        end = self._kv.snapshot_at(state, computed)
        return min(num_tokens, end - computed) if end else num_tokens

    def _preempt_for(self, state: RequestState, num_tokens: int, plan: StepPlan) -> BlockIds | None:
        """Blocks for a running request, taken from others; None if it was preempted itself.

        The running list is in the policy's order and is walked from the front, so a victim from
        its end is never already part of this step.
        """
        while True:
            victim = self._roster.running.pop()
            self._roster.preempt(victim)
            plan.num_preempted += 1
            if victim is state:
                return None
            gained = self._kv.allocate(state, num_tokens)
            if gained is not None:
                return gained

    def _schedule_waiting(self, plan: StepPlan) -> None:
        passed_over: list[RequestState] = []
        waiting = self._roster.waiting
        # The look-ahead is bounded, so that a queue of long prompts is not walked in every step.
        while (
            len(waiting)
            and plan.budget > 0
            and plan.num_prompt_tokens < self._limits.enough_prompt
            and len(self._roster.running) < self._limits.max_seqs
            and len(passed_over) < self._limits.max_seqs
        ):
            state = waiting.peek()
            # Preempted with a token in flight: it needs that token first, and nobody may take the
            # blocks it is waiting for.
            if state.num_steps_in_flight or not self._limits.encodes(state, plan):
                break
            try:
                match = self._match_prefix(state)
                most = self._limits.admissible(state.num_tokens - match.num_tokens, plan)
                num_tokens = most and self._to_snapshot(state, match.num_tokens, most)
                gained = self._allocate(state, num_tokens, match) if num_tokens else None
            except Exception as error:
                self._refuse(state, error)
                continue
            if num_tokens is None:
                passed_over.append(waiting.pop())
                continue
            if gained is None:
                break
            waiting.pop()
            self._roster.admit(state, match.num_tokens)
            plan.begin(state, gained, match.num_tokens)
            held_back = num_tokens < (most or 0)
            plan.add(state, num_tokens, self._limits.long_threshold, held_back=held_back)
        for state in reversed(passed_over):
            waiting.push_back_first(state)

    def _use_rest(self, plan: StepPlan) -> None:
        """Give what nobody else could use to the long prompts that had to share."""
        for index, (state, _, samples) in enumerate(plan.entries):
            num_tokens = min(state.num_tokens - state.num_computed_tokens, plan.budget)
            if samples or num_tokens == 0:
                continue
            scheduled = plan.num_scheduled_tokens[state.request_id]
            before = state.num_computed_tokens - scheduled
            num_tokens = self._to_snapshot(state, before, scheduled + num_tokens) - scheduled
            if num_tokens == 0:
                continue
            # Asked for together with what the step holds already: by itself the second part would
            # release what a sliding window leaves behind, and the first part still reads that.
            state.num_computed_tokens = before
            try:
                gained = self._kv.allocate(state, scheduled + num_tokens)
            except Exception:
                # It is part of this step already. If this raises again, the next one ends it.
                logger.exception("request %s gets no more of a step", state.request_id)
                gained = None
            finally:
                state.num_computed_tokens += scheduled
            if gained is None:
                break
            plan.extend(index, num_tokens, gained)

    def _next_suspect(self) -> RequestState | None:
        """Who is computed alone now."""
        if self.suspects:
            self.suspects = [state for state in self.suspects if not state.finished]
        suspended = RequestStatus.SUSPENDED
        return next((state for state in self.suspects if state.status is not suspended), None)

    def _schedule_suspect(self, state: RequestState, plan: StepPlan) -> None:
        """A step for one request alone: as much of it as fits."""
        if state.status is RequestStatus.RUNNING:
            num_tokens = min(state.num_tokens - state.num_computed_tokens, plan.budget)
            gained = self._make_room(state, lambda: self._allocate(state, num_tokens))
            plan.add(state, num_tokens, self._limits.long_threshold)
            if any(gained):
                plan.new_block_ids[state.request_id] = gained
            return
        if len(self._roster.running) >= self._limits.max_seqs:  # it was suspended, and others came
            self._roster.preempt(self._roster.running.pop())
        match = self._match_prefix(state)
        num_tokens = min(state.num_tokens - match.num_tokens, plan.budget)
        gained = self._make_room(state, lambda: self._allocate(state, num_tokens, match))
        self._roster.waiting.take(state)
        self._roster.admit(state, match.num_tokens)
        plan.begin(state, gained, match.num_tokens)
        plan.add(state, num_tokens, self._limits.long_threshold)

    def _make_room(self, state: RequestState, allocate: Callable[[], BlockIds | None]) -> BlockIds:
        """Blocks for one request, if need be from all others.

        Raises:
            RuntimeError: the whole cache is too small, which was checked when the request came.
        """
        gained = allocate()
        while gained is None:
            victim = next(
                (other for other in reversed(self._roster.running) if other is not state), None
            )
            if victim is None:
                raise RuntimeError("the cache has no room for a request that fits into it")
            self._roster.running.remove(victim)
            self._roster.preempt(victim)
            gained = allocate()
        return gained

    def _allocate(
        self, state: RequestState, num_tokens: int, match: PrefixMatch | None = None
    ) -> BlockIds | None:
        if failpoints.PLAN is not None:
            failpoints.hit("kv.alloc", state.request_id)
        return self._kv.allocate(state, num_tokens, match)

    def _match_prefix(self, state: RequestState) -> PrefixMatch:
        if failpoints.PLAN is not None:
            failpoints.hit("kv.match", state.request_id)
        return self._kv.match_prefix(state)

    def _refuse(self, state: RequestState, error: Exception) -> None:
        """Something raised while a step was filled with this request."""
        if state in self._roster.running:
            self._roster.running.remove(state)
        self._refused.append(self._roster.end_raising(state, error))
