"""Fills steps: running requests first, then waiting ones, or one that is quarantined alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from headrace_core.errors import RequestError
from headrace_core.reliability import failpoints
from headrace_engine.kv.contract import BlockIds, KVCacheManager, PrefixMatch
from headrace_engine.kv_transfer.scheduler import KVTransfer
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.adapter_slots import SlotPlanner
from headrace_engine.scheduler.batch_plan import BatchPlan, StepLimits
from headrace_engine.scheduler.decode_group import DecodeGroup
from headrace_engine.scheduler.draft_limits import DraftLimits
from headrace_engine.scheduler.media_limits import MediaLimits
from headrace_engine.scheduler.prompt_pace import PromptPace
from headrace_engine.scheduler.request import RequestStatus, SchedulerRequest
from headrace_engine.scheduler.request_tracker import RequestTracker

logger = logging.getLogger(__name__)


class BatchBuilder:
    """Decides who takes part in a step, with how many tokens.

    Args:
        tracker: whom there is to choose from.
        kv: hands out blocks.
        limits: of steps.
        media: of media in them.
        drafts: of guesses in them; None: nothing is guessed.
        transfer: blocks that are outside the pools; None: there are none.
        pace: of prompts beside requests that decode; None: they may fill steps.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        kv: KVCacheManager,
        limits: StepLimits,
        media: MediaLimits,
        drafts: DraftLimits | None = None,
        transfer: KVTransfer | None = None,
        pace: PromptPace | None = None,
    ) -> None:
        self._tracker = tracker
        self._kv = kv
        self._limits = limits
        self._media = media
        self._drafts = drafts
        self._transfer = transfer
        self._pace = pace
        # Where prompts are bounded by who decodes, or compete with those that wait, the step takes all that
        # decode first.
        self._prompts_last = pace is not None or tracker.waiting.reorders_begun
        self._adapters = tracker.adapters
        self.quarantined: list[SchedulerRequest] = []
        """To be computed alone, in this order; see :mod:`headrace_engine.scheduler.scheduler`."""
        self._refused: list[CoreOutput] = []
        """Outputs of requests that ended while a step was filled."""

    def fill(self) -> BatchPlan:
        """The next step; without entries if nothing can run now."""
        self._tracker.waiting.refresh()
        plan = self._limits.plan(self._tracker)
        while not plan.num_requests and (state := self._next_quarantined()) is not None:
            if self._transfer is not None and self._transfer.is_loading:
                return plan  # it may need the blocks that are held until then
            try:
                if self._adapters is not None and not self._make_slot(self._adapters, state):
                    return plan
                self._schedule_quarantined(state, plan)
            except Exception as error:
                self._refuse(state, error)
        if plan.num_requests:
            return plan
        plan.may_wait = True
        self._fill(plan)
        if plan.waits and not plan.num_requests:  # nobody gains by the waiting
            self._media.ahead.drop_wanted()
            plan = self._limits.plan(self._tracker)
            self._fill(plan)
        return plan

    def take_refused(self) -> list[CoreOutput]:
        """Outputs of requests that :meth:`fill` ended, each once: they raised an error."""
        refused, self._refused = self._refused, []
        return refused

    def quarantine(self, states: Iterable[SchedulerRequest]) -> None:
        """Compute these one by one from now on."""
        self.quarantined += [state for state in states if state not in self.quarantined]

    def clear(self, state: SchedulerRequest) -> None:
        """A request has yielded a token: it can be computed."""
        if self.quarantined and state in self.quarantined:
            self.quarantined.remove(state)

    def _fill(self, plan: BatchPlan) -> None:
        begun = self._schedule_running(plan)
        # After a preemption the pool is exhausted: admitting now would only thrash.
        if self._adapters is not None and not plan.num_preempted:
            self._open_slots(self._adapters)
        if self._pace is not None and (plan.num_requests or plan.delays_tokens):
            plan.most_prompt_tokens = self._pace.most_prompt_tokens(plan.size - plan.budget)
        for state in self._tracker.waiting.in_order(begun):
            if not plan.num_preempted:
                self._schedule_waiting(plan, before=state)
            self._go_on(state, plan)
        if not plan.num_preempted:
            self._schedule_waiting(plan)
            if plan.contended:
                self._use_rest(plan)

    def _schedule_running(self, plan: BatchPlan) -> list[SchedulerRequest]:
        """Add who runs.

        Returns:
            Those that have begun their prompts and are still to be added, where prompts come last.
        """
        begun: list[SchedulerRequest] = []
        running, group = self._tracker.running, self._tracker.decoding
        parts = None
        if self._are_alike and (group.size or group.is_open):
            parts = group.parts(min(plan.budget, plan.max_requests), self._prompts_last)
        if parts is None:
            if group.size:
                group.dissolve()
            self._walk(list(running), plan, begun)
        else:
            before, behind = parts
            self._walk(before, plan, begun)
            plan.add_group(group.schedule())
            self._walk(behind, plan, begun)
            if plan.num_grouped:
                plan.num_scheduled_tokens, plan.shares_counts = running.counts(
                    plan.num_scheduled_tokens, may_share=not len(self._tracker.waiting)
                )
        plan.num_in_order = len(plan.entries)
        return begun

    @property
    def _are_alike(self) -> bool:
        """True if requests that decode differ by their tokens only."""
        return self._drafts is None and self._limits.steps_beside == 1 and failpoints.PLAN is None

    def _walk(
        self, states: Sequence[SchedulerRequest], plan: BatchPlan, begun: list[SchedulerRequest]
    ) -> None:
        """Look at running requests, in order, and add them. Members of the group are part of the step anyway:
        they are given blocks.

        Args:
            begun: gains those that have begun their prompts, where prompts come last.
        """
        index = 0
        allocate = self._kv.allocate if failpoints.PLAN is None else self._allocate
        waits_for_tokens = self._limits.steps_beside > 1
        are_alike = self._are_alike
        while index < len(states) and plan.budget > 0 and plan.num_requests < plan.max_requests:
            state = states[index]
            index += 1
            if state.status is not RequestStatus.RUNNING:
                continue  # one before it needed its blocks
            if state.group is not None:
                index = self._give_blocks(state.group, states, index - 1, plan)
                continue
            if are_alike and state.is_quiet:
                index = plan.add_quiet(states, index - 1)
                continue
            num_tokens = state.num_tokens
            if num_tokens >= state.max_num_tokens:
                continue  # the steps in flight bring it to its end
            if (state.is_slow or waits_for_tokens) and state.num_placeholders:
                plan.delays_tokens = True
                continue  # its next token takes long: a step with it might have to wait
            num_tokens -= state.num_computed_tokens
            decodes, most = num_tokens == 1, num_tokens
            if self._prompts_last and not decodes:
                begun.append(state)
                continue
            if not decodes:
                most = min(self._limits.share(num_tokens, plan), plan.budget)
                num_tokens = self._to_border(state, state.num_computed_tokens, most, plan)
                if num_tokens == 0:
                    continue  # a part of it that must not be cut needs a step with more room
            num_drafts = 0
            try:
                if decodes and self._drafts is not None:
                    num_running = len(self._tracker.running)
                    num_drafts = self._drafts.room(state, plan.budget, plan.size, num_running)
                gained = allocate(state, num_tokens + num_drafts)
                if gained is None and num_drafts:
                    num_drafts = 0
                    gained = allocate(state, num_tokens)
                if gained is None:
                    gained = self._preempt_for(state, num_tokens, plan)
            except Exception as error:
                self._refuse(state, error)
                continue
            if gained is None:
                break
            if decodes:
                plan.add_decode(state, num_drafts)
                if are_alike and not state.is_slow:
                    self._keep_quiet(state)
            else:
                self._add(state, num_tokens, plan, held_back=num_tokens < most)
            if any(gained):
                plan.new_block_ids[state.request_id] = gained

    def _give_blocks(
        self, group: DecodeGroup, states: Sequence[SchedulerRequest], index: int, plan: BatchPlan
    ) -> int:
        """Make room for the next token of members that follow one another from ``index`` on; they are part of
        the step anyway.

        Returns:
            Index of the next to be looked at: the first that is no member, the one behind a member that
            others were preempted for, or that was ended; or the end, if there is no room for one.
        """
        count = len(states)
        end = next((i for i in range(index, count) if states[i].group is not group), count)
        new_block_ids = plan.new_block_ids
        try:
            for gained, until, until_known in self._kv.allocate_each(states[index:end]):
                state = states[index]
                if gained is None:
                    gained = self._preempt_for(state, 1, plan)
                    if gained is None:
                        return count
                    until, until_known = self._kv.quiet_until(state.request_id)
                    end = index + 1
                state.keep_quiet(until, until_known)
                group.keep(state)
                if any(gained):
                    new_block_ids[state.request_id] = gained
                index += 1
                if index == end:
                    break
        except Exception as error:
            self._refuse(states[index], error)
            index += 1
        return index

    def _keep_quiet(self, state: SchedulerRequest) -> None:
        """Look at a decoding request again only when something will happen to it."""
        state.keep_quiet(*self._kv.quiet_until(state.request_id))

    def _add(
        self, state: SchedulerRequest, num_tokens: int, plan: BatchPlan, *, held_back: bool = False
    ) -> None:
        """Count further tokens of a request as computed by the step, and the vectors of their media."""
        if state.media:
            start = state.num_computed_tokens
            plan.num_media_vectors += self._media.num_vectors(state, start, num_tokens)
        plan.add(state, num_tokens, self._limits.long_threshold, held_back=held_back)

    def _to_border(
        self, state: SchedulerRequest, computed: int, num_tokens: int, plan: BatchPlan
    ) -> int:
        """Number of tokens instead of ``num_tokens`` further ones, so that the step ends where it may. 0: it
        cannot hold any."""
        if not self._limits.cuts_prompts:
            return num_tokens
        return self._media.cut(
            state, computed, self._to_snapshot(state, computed, num_tokens), plan
        )

    def _to_snapshot(self, state: SchedulerRequest, computed: int, num_tokens: int) -> int:
        """So many of ``num_tokens`` further tokens that a state which other requests may begin from is
        not passed by."""
        end = self._kv.snapshot_at(state, computed)
        return min(num_tokens, end - computed) if end else num_tokens

    def _preempt_for(
        self, state: SchedulerRequest, num_tokens: int, plan: BatchPlan
    ) -> BlockIds | None:
        """Blocks for a running request, taken from others; None if it was preempted itself.

        The running list is in the policy's order and is walked from the front, so a victim from
        its end is never already part of this step.
        """
        while True:
            victim = self._tracker.running.pop()
            self._tracker.preempt(victim)
            plan.num_preempted += 1
            if victim is state:
                return None
            gained = self._kv.allocate(state, num_tokens)
            if gained is not None:
                return gained

    def _go_on(self, state: SchedulerRequest, plan: BatchPlan) -> None:
        """Add a further part of a prompt that has begun, if there is room for it behind others."""
        if state.status is not RequestStatus.RUNNING:
            return  # one before it needed its blocks
        if plan.prompt_budget <= 0 or plan.num_requests >= plan.max_requests:
            return
        computed = state.num_computed_tokens
        most = min(self._limits.share(state.num_tokens - computed, plan), plan.prompt_budget)
        try:
            num_tokens = self._to_border(state, computed, most, plan)
            if num_tokens == 0:
                return  # a part of it that must not be cut needs a step with more room
            gained = self._allocate(state, num_tokens)
            if gained is None:
                gained = self._preempt_beside(state, num_tokens, plan)
        except Exception as error:
            self._refuse(state, error)
            return
        if gained is None:
            return
        self._add(state, num_tokens, plan, held_back=num_tokens < most)
        if any(gained):
            plan.new_block_ids[state.request_id] = gained

    def _preempt_beside(
        self, state: SchedulerRequest, num_tokens: int, plan: BatchPlan
    ) -> BlockIds | None:
        """Blocks for a prompt that has begun, taken from requests behind it that are not part of the step.

        Returns:
            None if they are not enough: it keeps its own and waits for others to end, or is preempted itself
            if nobody runs.
        """
        for victim in reversed(self._tracker.running.behind(state)):
            if victim.request_id in plan.num_scheduled_tokens:
                continue
            self._preempt(victim, plan)
            gained = self._kv.allocate(state, num_tokens)
            if gained is not None:
                return gained
        if not plan.num_requests:
            self._preempt(state, plan)
        return None

    def _preempt(self, victim: SchedulerRequest, plan: BatchPlan) -> None:
        self._tracker.running.remove(victim)
        self._tracker.preempt(victim)
        plan.num_preempted += 1

    def _schedule_waiting(self, plan: BatchPlan, *, before: SchedulerRequest | None = None) -> None:
        """Add who waits, as far as there is room; ``before``: only who precedes that running request."""
        passed_over: list[SchedulerRequest] = []
        waiting = self._tracker.waiting
        # The look-ahead is bounded, so that a queue of long prompts is not walked in every step.
        while (
            len(waiting)
            and plan.prompt_budget > 0
            and plan.num_prompt_tokens < self._limits.enough_prompt
            and len(self._tracker.running) < self._limits.max_seqs
            and plan.num_requests < plan.max_requests
            and len(passed_over) < self._limits.max_seqs
        ):
            state = waiting.peek()
            if before is not None and not waiting.precedes(before):
                break
            if state.adapter is not None and not self._has_slot(state):
                continue
            # Preempted with a token in flight: it needs that token first, and nobody may take the
            # blocks it is waiting for.
            if state.num_steps_in_flight or not self._limits.encodes(state, plan):
                break
            try:
                match = self._match_prefix(state)
                if self._transfer is not None and self._transfer.waits(state, match.num_tokens):
                    passed_over.append(waiting.pop())
                    continue
                if state.media and self._media.waits(state, match.num_tokens, plan):
                    passed_over.append(waiting.pop())
                    continue
                most = self._limits.admissible(state.num_tokens - match.num_tokens, plan)
                num_tokens = most and self._to_border(state, match.num_tokens, most, plan)
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
            self._tracker.admit(state, match.num_tokens)
            plan.begin(state, gained, match.num_tokens)
            held_back = num_tokens < (most or 0)
            self._add(state, num_tokens, plan, held_back=held_back)
        for state in reversed(passed_over):
            waiting.push_back_first(state)

    def _open_slots(self, adapters: SlotPlanner) -> None:
        """Hand out free slots; requests that waited for them go back into the queue."""
        opened = adapters.open_slots()
        for state, error in opened.failed:
            self._refused.append(self._tracker.end(state, "error", error=str(error)))
        if opened.returned:
            self._tracker.put_back(opened.returned)

    def _has_slot(self, state: SchedulerRequest) -> bool:
        """True if the head of the queue may run with its adapter; else it is out of the queue."""
        assert self._adapters is not None
        try:
            if self._adapters.admits(state):
                return True
        except RequestError as error:
            self._refused.append(self._tracker.end(state, "error", error=str(error)))
            return False
        self._tracker.waiting.pop()
        self._tracker.set_aside(state)
        return False

    def _make_slot(self, adapters: SlotPlanner, state: SchedulerRequest) -> bool:
        """See that a request which runs alone has its adapter in a slot; False: it is still being read."""
        leaving = adapters.slot_to_force(state)
        if leaving is not None:
            for other in [one for one in self._tracker.running if one.adapter is leaving]:
                self._tracker.running.remove(other)
                self._tracker.preempt(other)
        return adapters.force(state)

    def _use_rest(self, plan: BatchPlan) -> None:
        """Give what nobody else could use to the long prompts that had to share."""
        for index, (state, _, samples, _) in enumerate(plan.entries):
            num_tokens = min(state.num_tokens - state.num_computed_tokens, plan.prompt_budget)
            if samples or num_tokens <= 0 or state.media:
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

    def _next_quarantined(self) -> SchedulerRequest | None:
        """The request that is computed alone now."""
        if self.quarantined:
            self.quarantined = [state for state in self.quarantined if not state.finished]
        suspended = RequestStatus.SUSPENDED
        return next((state for state in self.quarantined if state.status is not suspended), None)

    def _schedule_quarantined(self, state: SchedulerRequest, plan: BatchPlan) -> None:
        """A step for one request alone: as much of it as fits."""
        if state.status is RequestStatus.RUNNING:
            num_tokens = self._alone(state, state.num_computed_tokens, plan)
            gained = self._make_room(state, lambda: self._allocate(state, num_tokens))
            self._add(state, num_tokens, plan)
            if any(gained):
                plan.new_block_ids[state.request_id] = gained
            return
        if len(self._tracker.running) >= self._limits.max_seqs:  # it was suspended, and others came
            self._tracker.preempt(self._tracker.running.pop())
        match = self._match_prefix(state)
        num_tokens = self._alone(state, match.num_tokens, plan)
        gained = self._make_room(state, lambda: self._allocate(state, num_tokens, match))
        self._tracker.take_out(state)
        self._tracker.admit(state, match.num_tokens)
        plan.begin(state, gained, match.num_tokens)
        self._add(state, num_tokens, plan)

    def _alone(self, state: SchedulerRequest, computed: int, plan: BatchPlan) -> int:
        """As many of a request's tokens as a step holds that has nothing else."""
        return self._media.cut(state, computed, min(state.num_tokens - computed, plan.budget), plan)

    def _make_room(
        self, state: SchedulerRequest, allocate: Callable[[], BlockIds | None]
    ) -> BlockIds:
        """Blocks for one request, if need be from all others.

        Raises:
            RuntimeError: the whole cache is too small, which was checked when the request came.
        """
        gained = allocate()
        while gained is None:
            victim = next(
                (other for other in reversed(self._tracker.running) if other is not state), None
            )
            if victim is None:
                raise RuntimeError("the cache has no room for a request that fits into it")
            self._tracker.running.remove(victim)
            self._tracker.preempt(victim)
            gained = allocate()
        return gained

    def _allocate(
        self, state: SchedulerRequest, num_tokens: int, match: PrefixMatch | None = None
    ) -> BlockIds | None:
        if failpoints.PLAN is not None:
            failpoints.hit("kv.alloc", state.request_id)
        return self._kv.allocate(state, num_tokens, match)

    def _match_prefix(self, state: SchedulerRequest) -> PrefixMatch:
        if failpoints.PLAN is not None:
            failpoints.hit("kv.match", state.request_id)
        return self._kv.match_prefix(state)

    def _refuse(self, state: SchedulerRequest, error: Exception) -> None:
        """Something raised while a step was filled with this request."""
        if state in self._tracker.running:
            self._tracker.running.remove(state)
        self._refused.append(self._tracker.end_raising(state, error))
