"""Decides, step by step, which tokens of which requests are computed.

The loop around it is ``schedule``, execute, ``update``. A schedule is ``{request: number of
tokens}``; there are no phases. Running requests come first, then waiting ones, under one token
budget; what does not fit into the cache is preempted (its blocks are freed) and computed again
later, helped by whatever the prefix cache still holds.

**Steps in flight.** With asynchronous scheduling a second step is scheduled while the first runs.
Two things make that safe:

* *Order.* Steps are executed in the order in which they are scheduled. A block freed while
  scheduling step t+1 (preemption, abort, a finished request) may still be written by step t; its
  next owner is scheduled in t+1 or later and so writes after that. Nothing waits for steps in
  flight before its blocks are reused.
* *Identity.* The results of a step are matched with the request objects and epochs noted when it
  was scheduled, never with ids alone, so that a late result cannot be taken for a new one.

A request that is preempted while a token of it is in flight keeps that token: it is appended when
it arrives, and the request is not resumed before.

**Failures.** What raises while one request is looked at ends that request. When a step of several
requests raises, nobody knows whose fault it was: all of them become *suspects* and are computed
again, each in a step of its own, until it has yielded a token; the one whose own step raises is
ended. Others wait meanwhile. As outputs do not depend on what else is in a step, nobody else sees
a difference (ADR 0029).
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from headrace_core import failpoints
from headrace_core.config import SchedulerConfig
from headrace_core.engine import EngineStats
from headrace_core.errors import ConfigError, PromptTooLong, QueueFull, RequestError
from headrace_core.kv import BlockIds, KVCacheManager, PrefixMatch
from headrace_core.request import CoreRequest
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduling.counters import AdmissionRate, SchedulerCounters
from headrace_engine.scheduling.plan import StepPlan, new_request
from headrace_engine.scheduling.queue import FairQueue, FCFSQueue, PriorityQueue, WaitingQueue
from headrace_engine.scheduling.request import InFlight, RequestState, RequestStatus
from headrace_engine.scheduling.stopping import finish_reason

logger = logging.getLogger(__name__)

_sort_key = attrgetter("sort_key")


class Scheduler:
    """The scheduler behind ``scheduler_cls = "default"``. Called from one thread only.

    Args:
        config: resolved (no None in the limits).
        kv: hands out blocks.
        max_model_len: longest sequence, in tokens.
        async_scheduling: whether a step may be scheduled before the previous one's result is
            known; None takes the config's value, and on if that is None too.
        clock: monotonic seconds.

    Raises:
        ConfigError: ``max_num_batched_tokens`` or ``max_num_seqs`` is not resolved.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        async_scheduling: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(config, name) is None:
                raise ConfigError(
                    f"scheduler.{name} = None: must be resolved to a number before a scheduler is "
                    "made",
                    field=f"scheduler.{name}",
                )
        overlapped = config.async_scheduling if async_scheduling is None else async_scheduling
        self._config = config
        self._kv = kv
        self._clock = clock
        self._max_model_len = max_model_len
        self._max_tokens: int = config.max_num_batched_tokens or 0
        self._max_seqs: int = config.max_num_seqs or 0
        shared = max(config.max_num_shared_tokens or self._max_tokens, self._max_seqs)
        # Whole prompts must fit into a step where they may not be cut.
        self._shared_tokens = shared if config.enable_chunked_prefill else self._max_tokens
        # Where steps are to be small, a step that holds this much of prompts begins no further one:
        # it would only delay the first tokens of those that it holds (ADR 0017).
        tight = self._shared_tokens < self._max_tokens
        half = max(self._shared_tokens // 2, self._max_seqs)
        self._enough_prompt = half if tight else self._max_tokens
        self._max_steps_in_flight = 1 if overlapped is False else 2
        self._by_priority = config.policy == "priority"
        self._long_threshold = config.long_prefill_token_threshold
        self._requests: dict[str, RequestState] = {}
        self._fair = FairQueue(config.fair_weights) if config.policy == "fair" else None
        self._waiting: WaitingQueue = FCFSQueue()
        if self._fair is not None:
            self._waiting = self._fair
        elif self._by_priority:
            self._waiting = PriorityQueue()
        self._suspects: list[RequestState] = []
        """To be computed alone, in this order; see the module's docstring."""
        self._refused: list[CoreOutput] = []
        """Of requests that ended while a step was filled."""
        self._running: list[RequestState] = []
        """In the policy's order: whoever is last is preempted first."""
        self._in_flight: deque[tuple[int, list[InFlight]]] = deque()
        self._gone: list[str] = []
        self._num_added = 0
        self._next_step_id = 0
        self._counters = SchedulerCounters()
        self._admissions = AdmissionRate()

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: CoreRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: the id is in use, the prompt is empty, or the request could never run: it
                is longer than the context (:class:`PromptTooLong`) or than the whole cache.
            QueueFull: too many wait; says when to try again.
        """
        if failpoints.PLAN is not None:
            failpoints.hit("engine.add", request.request_id)
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id = {request.request_id!r}: a request of that id is running; ids must "
                "be unique",
                param="request_id",
                value=request.request_id,
            )
        self._check_length(request)
        if len(self._waiting) >= self._config.max_queued_requests:
            raise QueueFull(
                f"{len(self._waiting)} requests wait already (max_queued_requests = "
                f"{self._config.max_queued_requests})",
                retry_after=self._admissions.retry_after(self._clock()),
            )
        state = RequestState.create(
            request,
            self._num_added,
            by_priority=self._by_priority,
            now=self._clock(),
            max_model_len=self._max_model_len,
        )
        self._num_added += 1
        self._requests[state.request_id] = state
        self._waiting.push(state)

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests with reason ``abort``; unknown ids are ignored.

        Their blocks are free at once, also those that a step in flight still writes (see the
        module's docstring); results that arrive later are dropped.
        """
        outputs = []
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                outputs.append(self._end(state, "abort"))
        self._drop_finished()
        return outputs

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were scheduled and neither updated nor failed."""
        return len(self._in_flight)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nothing can run before a step in flight has ended."""
        most_in_flight = 1 if self._suspects else self._max_steps_in_flight
        if len(self._in_flight) >= most_in_flight:
            return None
        plan = StepPlan(self._budget(), contended=self._is_contended())
        while not plan.entries and (suspect := self._next_suspect()) is not None:
            try:
                self._schedule_suspect(suspect, plan)
            except Exception as error:
                self._refuse(suspect, error)
        if not plan.entries:
            self._fill(plan)
        if not plan.entries:
            return None
        step = plan.build(self._next_step_id, self._gone)
        self._gone = []
        self._next_step_id += 1
        self._in_flight.append((step.step_id, plan.entries))
        self._counters.count_step(plan.size - plan.budget)
        return step

    def take_refused(self) -> list[CoreOutput]:
        """Outputs of requests that :meth:`schedule` ended, each once: they raised an error."""
        refused, self._refused = self._refused, []
        return refused

    def update(self, step: ScheduledStep, result: StepResult) -> list[CoreOutput]:
        """Take a step's result; one output for each request that got a token or ended.

        Raises:
            RuntimeError: the step is not the oldest in flight, or the result is another step's.
        """
        if result.step_id != step.step_id:
            raise RuntimeError(f"result of step {result.step_id} given for step {step.step_id}")
        outputs, num_unfinished = [], len(self._requests)
        find, ended = result.requests.get, RequestStatus.FINISHED
        for state, epoch, samples in self._land(step):
            if state.epoch != epoch or state.status is ended:
                continue
            state.num_steps_in_flight -= 1
            state.num_placeholders -= samples
            try:
                output = self._take(state, samples, find(state.request_id))
            except Exception as error:
                output = self._end_raising(state, error)
            if output is not None:
                outputs.append(output)
        if len(self._requests) < num_unfinished:
            self._drop_finished()
        return outputs

    def fail(self, step: ScheduledStep, message: str) -> list[CoreOutput]:
        """The worker could not execute a step: if it was one request's, that ends with reason
        ``error``; if it was several requests', they will be computed one by one.

        Blocks that the step should have written may already serve as another request's prefix, so
        every cached block is forgotten and every other running request starts again; what they
        have in flight is dropped (nobody has seen those tokens).
        """
        entries = self._land(step)
        concerned = [s for s, epoch, _ in entries if s.epoch == epoch and not s.finished]
        outputs = []
        if len(entries) == 1:
            outputs += [self._end(state, "error", error=message) for state in concerned]
        elif concerned:  # one of several, even if the others have ended meanwhile
            logger.warning("%d requests are computed again, one by one", len(concerned))
            self._suspects += [state for state in concerned if state not in self._suspects]
        self._drop_finished()
        self.preempt_all()
        for state in self._requests.values():
            state.epoch += 1
            state.num_steps_in_flight = state.num_placeholders = 0
        # The worker may not have come to forget whom this step said to. Nobody is left there.
        self._gone = list(dict.fromkeys([*step.gone_request_ids, *self._gone]))
        self._kv.reset_prefix_cache()
        return outputs

    # -- control -------------------------------------------------------------------------------

    def preempt_all(self) -> None:
        """Send every running request back to the queue; their tokens are kept."""
        while self._running:
            self._preempt(self._running.pop())

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks.

        Args:
            reset_running_requests: preempt whatever holds blocks; it is computed again later.

        Returns:
            False, with nothing changed, if requests hold blocks.
        """
        if reset_running_requests:
            self.preempt_all()
        return self._kv.reset_prefix_cache()

    def stats(self, *, drain: bool = False) -> EngineStats:
        """Counters and gauges, but for ``block_size`` and ``heartbeat_age``, which others know.

        Args:
            drain: empty ``step_tokens`` after copying it.
        """
        counters, kv = self._counters, self._kv
        counters.take_prefix_cache(kv)
        stats = EngineStats(
            num_requests_running=len(self._running),
            num_requests_waiting=len(self._waiting),
            kv_cache_usage=(kv.num_blocks - kv.num_free_blocks) / kv.num_blocks,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free_blocks,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_preemptions=counters.num_preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_steps=counters.num_steps,
            iteration_tokens=counters.iteration_tokens,
            step_tokens=list(counters.step_tokens),
        )
        if drain:
            counters.step_tokens.clear()
        return stats

    # -- filling a step ------------------------------------------------------------------------

    def _fill(self, plan: StepPlan) -> None:
        self._schedule_running(plan)
        # After a preemption the pool is exhausted: admitting now would only thrash.
        if not plan.num_preempted:
            self._schedule_waiting(plan)
            if plan.contended:
                self._use_rest(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        index, running = 0, self._running
        allocate = self._kv.allocate if failpoints.PLAN is None else self._allocate
        while index < len(running) and plan.budget > 0:
            state = running[index]
            index += 1
            num_tokens = len(state.all_token_ids) + state.num_placeholders
            if num_tokens >= state.max_num_tokens:
                continue  # the steps in flight bring it to its end
            num_tokens -= state.num_computed_tokens
            decodes = num_tokens == 1
            if not decodes:
                num_tokens = min(self._share(num_tokens, plan), plan.budget)
            try:
                gained = allocate(state, num_tokens)
            except Exception as error:
                index -= 1
                self._refuse(state, error)
                continue
            if gained is None and (gained := self._preempt_for(state, num_tokens, plan)) is None:
                break
            if decodes:
                plan.add_decode(state)
            else:
                plan.add(state, num_tokens, self._long_threshold)
            if gained[0]:
                plan.new_block_ids[state.request_id] = gained

    def _preempt_for(self, state: RequestState, num_tokens: int, plan: StepPlan) -> BlockIds | None:
        """Blocks for a running request, taken from others; None if it was preempted itself.

        The running list is in the policy's order and is walked from the front, so a victim from
        its end is never already part of this step.
        """
        while True:
            victim = self._running.pop()
            self._preempt(victim)
            plan.num_preempted += 1
            if victim is state:
                return None
            gained = self._kv.allocate(state, num_tokens)
            if gained is not None:
                return gained

    def _schedule_waiting(self, plan: StepPlan) -> None:
        passed_over: list[RequestState] = []
        waiting = self._waiting
        # The look-ahead is bounded, so that a queue of long prompts is not walked in every step.
        while (
            len(waiting)
            and plan.budget > 0
            and plan.num_prompt_tokens < self._enough_prompt
            and len(self._running) < self._max_seqs
            and len(passed_over) < self._max_seqs
        ):
            state = waiting.peek()
            # Preempted with a token in flight: it needs that token first, and nobody may take the
            # blocks it is waiting for.
            if state.num_steps_in_flight:
                break
            try:
                match = self._match_prefix(state)
                num_tokens = self._admissible(state.num_tokens - match.num_tokens, plan)
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
            self._admit(state, match.num_tokens)
            plan.new_requests.append(new_request(state, gained, match.num_tokens))
            plan.add(state, num_tokens, self._long_threshold)
        for state in reversed(passed_over):
            waiting.push_back_first(state)

    def _next_suspect(self) -> RequestState | None:
        """Who is computed alone now."""
        if self._suspects:
            self._suspects = [state for state in self._suspects if not state.finished]
        return self._suspects[0] if self._suspects else None

    def _schedule_suspect(self, state: RequestState, plan: StepPlan) -> None:
        """A step for one request alone: as much of it as fits."""
        if state.status is RequestStatus.RUNNING:
            num_tokens = min(state.num_tokens - state.num_computed_tokens, plan.budget)
            gained = self._make_room(state, lambda: self._allocate(state, num_tokens))
            plan.add(state, num_tokens, self._long_threshold)
            if gained[0]:
                plan.new_block_ids[state.request_id] = gained
            return
        match = self._match_prefix(state)
        num_tokens = min(state.num_tokens - match.num_tokens, plan.budget)
        gained = self._make_room(state, lambda: self._allocate(state, num_tokens, match))
        self._waiting.take(state)
        self._admit(state, match.num_tokens)
        plan.new_requests.append(new_request(state, gained, match.num_tokens))
        plan.add(state, num_tokens, self._long_threshold)

    def _make_room(self, state: RequestState, allocate: Callable[[], BlockIds | None]) -> BlockIds:
        """Blocks for one request, if need be from all others.

        Raises:
            RuntimeError: the whole cache is too small, which was checked when the request came.
        """
        gained = allocate()
        while gained is None:
            victim = next((other for other in reversed(self._running) if other is not state), None)
            if victim is None:
                raise RuntimeError("the cache has no room for a request that fits into it")
            self._running.remove(victim)
            self._preempt(victim)
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
        if state in self._running:
            self._running.remove(state)
        self._refused.append(self._end_raising(state, error))

    def _use_rest(self, plan: StepPlan) -> None:
        """Give what nobody else could use to the long prompts that had to share."""
        for index, (state, _, samples) in enumerate(plan.entries):
            num_tokens = min(state.num_tokens - state.num_computed_tokens, plan.budget)
            if samples or num_tokens == 0:
                continue
            # Asked for together with what the step holds already: by itself the second part would
            # release what a sliding window leaves behind, and the first part still reads that.
            scheduled = plan.num_scheduled_tokens[state.request_id]
            state.num_computed_tokens -= scheduled
            gained = self._kv.allocate(state, scheduled + num_tokens)
            state.num_computed_tokens += scheduled
            if gained is None:
                break
            plan.extend(index, num_tokens, gained)

    def _admissible(self, remaining: int, plan: StepPlan) -> int | None:
        """How many of a waiting request's tokens may run: 0 = it must wait, and so must all
        behind it; None = it must wait, but shorter ones may overtake it."""
        if not self._config.enable_chunked_prefill:
            return remaining if remaining <= plan.budget else 0
        num_tokens = min(self._share(remaining, plan), plan.budget)
        if num_tokens < remaining:
            is_long = 0 < self._long_threshold < remaining
            if is_long and plan.num_long_partial >= self._config.max_long_partial_prefills:
                return None
            if plan.num_partial >= self._config.max_num_partial_prefills:
                return 0
        return num_tokens

    def _share(self, remaining: int, plan: StepPlan) -> int:
        """At most its share of the budget for a long prompt, if others could use the rest."""
        if plan.contended and remaining > self._long_threshold:
            return min(remaining, max(1, plan.size // self._config.max_num_partial_prefills))
        return remaining

    def _budget(self) -> int:
        """Tokens of the next step. Where a step's time grows with them, a large one would let
        several prompts wait for each other, and decoding requests for all of them; a request that
        is alone loses nothing."""
        alone = len(self._requests) == 1
        return self._max_tokens if alone else min(self._max_tokens, self._shared_tokens)

    def _is_contended(self) -> bool:
        if self._config.max_num_partial_prefills == 1 or not self._long_threshold:
            return False
        prefilling = sum(s.num_tokens - s.num_computed_tokens > 1 for s in self._running)
        return prefilling + len(self._waiting) > 1

    def _admit(self, state: RequestState, num_cached_tokens: int) -> None:
        if state.num_cached_tokens < 0:
            now = self._clock()
            state.num_cached_tokens, state.scheduled_ts = num_cached_tokens, now
            self._admissions.record(now)
            if self._fair is not None:
                self._fair.charge(state.request.owner, state.num_tokens - num_cached_tokens)
        # Pieces from before a preemption: the prompt is computed again from its beginning.
        state.prompt_logprobs.clear()
        state.num_computed_tokens = num_cached_tokens
        state.status = RequestStatus.RUNNING
        state.held_by_worker = True
        bisect.insort(self._running, state, key=_sort_key)

    def _preempt(self, state: RequestState) -> None:
        """Take a request, already out of the running list, back to the queue."""
        # First: what it has computed becomes findable for its own return.
        self._kv.free(state.request_id)
        state.num_computed_tokens = 0
        state.status = RequestStatus.PREEMPTED
        state.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._forget_in_worker(state)
        self._waiting.push_back_first(state)

    # -- taking a result -----------------------------------------------------------------------

    def _land(self, step: ScheduledStep) -> list[InFlight]:
        if not self._in_flight or self._in_flight[0][0] != step.step_id:
            expected = self._in_flight[0][0] if self._in_flight else None
            raise RuntimeError(f"step {step.step_id} has ended, but {expected} is the oldest")
        return self._in_flight.popleft()[1]

    def _take(
        self, state: RequestState, samples: bool, result: RequestStepResult | None
    ) -> CoreOutput | None:
        if failpoints.PLAN is not None:
            failpoints.hit("engine.update", state.request_id)
        if result is None:
            return self._end(state, "error", error="the worker returned no result for the request")
        if result.error is not None:
            return self._end(state, "error", error=result.error)
        if len(result.token_ids) != samples:
            found = len(result.token_ids)
            return self._end(
                state, "error", error=f"the worker returned {found} tokens instead of {samples:d}"
            )
        if state.prompt_logprobs_pending and result.prompt_logprobs:
            state.prompt_logprobs += result.prompt_logprobs
        if not samples:
            return None
        if state.num_output_tokens == 0:
            self._counters.prompt_tokens += state.num_prompt_tokens
        self._counters.generation_tokens += 1
        if self._fair is not None:
            self._fair.charge(state.request.owner, 1)
        if self._suspects and state in self._suspects:
            self._suspects.remove(state)  # it can be computed alone
        state.all_token_ids += result.token_ids
        reason = finish_reason(state)
        if reason is None:
            output = _output(state)
        else:
            output = self._end(state, reason)
            if reason == "stop":
                output.stop_token_id = state.all_token_ids[-1]
        output.new_token_ids, output.logprobs = result.token_ids, result.logprobs
        if state.prompt_logprobs_pending:
            state.prompt_logprobs_pending = False
            output.prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, []
        return output

    def _end(self, state: RequestState, reason: str, *, error: str | None = None) -> CoreOutput:
        """Free what a request holds; the caller takes it out of the running list."""
        if state.status is not RequestStatus.RUNNING:
            state.status = RequestStatus.FINISHED
            self._waiting.discard()
        state.status = RequestStatus.FINISHED
        self._kv.free(state.request_id)
        self._forget_in_worker(state)
        state.decoding_entry = None  # it refers back to the state
        del self._requests[state.request_id]
        output = _output(state)
        output.finish_reason, output.error = reason, error
        return output

    def _end_raising(self, state: RequestState, error: Exception) -> CoreOutput:
        """End a request because something raised when it was looked at."""
        logger.error("request %s ends: %s", state.request_id, error, exc_info=error)
        message = f"{type(error).__name__}: {error}"
        if not state.finished:
            return self._end(state, "error", error=message)
        output = _output(state)
        output.finish_reason, output.error = "error", message
        return output

    def _forget_in_worker(self, state: RequestState) -> None:
        if state.held_by_worker:
            state.held_by_worker = False
            self._gone.append(state.request_id)

    def _drop_finished(self) -> None:
        if any(state.finished for state in self._running):
            self._running = [state for state in self._running if not state.finished]

    def _check_length(self, request: CoreRequest) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        if num_prompt_tokens >= self._max_model_len:
            raise PromptTooLong(
                f"prompt: {num_prompt_tokens} tokens; with at least one token of output it must "
                f"be at most {self._max_model_len - 1} (the context holds {self._max_model_len})",
                param="prompt",
                value=num_prompt_tokens,
            )
        # The last token is never fed back, so it needs no place in the cache.
        needed = min(num_prompt_tokens + request.max_tokens, self._max_model_len) - 1
        if not self._kv.fits(needed):
            raise RequestError(
                f"prompt of {num_prompt_tokens} tokens with max_tokens = {request.max_tokens} "
                f"needs {needed} tokens of KV cache; the whole cache holds {self._capacity()}",
                param="max_tokens",
                value=request.max_tokens,
            )

    def _capacity(self) -> int:
        """Longest sequence that fits, in tokens (for messages: it asks a few times)."""
        return bisect.bisect_left(
            range(1, self._max_model_len + 1), True, key=lambda length: not self._kv.fits(length)
        )


def _output(state: RequestState) -> CoreOutput:
    """An output that says nothing new of a request. By position: one is made for every token."""
    return CoreOutput(
        state.request_id, [], None, None, None, None, None, max(state.num_cached_tokens, 0),
        state.num_preemptions, state.queued_ts, state.scheduled_ts,
    )  # fmt: skip
