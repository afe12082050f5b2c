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
requests raises, nobody knows whose fault it was: all of them are *quarantined* and are computed
again, each in a step of its own, until it has yielded a token; the one whose own step raises is
ended. Others wait meanwhile. As outputs do not depend on what else is in a step, nobody else sees
a difference (ADR 0029).

**Late tokens.** Where it takes long to find out which tokens a request's constraint allows, the worker
keeps the logits and returns no token; it samples when the mask is there, and returns the token with
whichever step runs then. Until that the request keeps its blocks and its placeholder, and is left out
of steps. If nothing else can run, a step without requests gives the worker time (ADR 0071).
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from headrace_core.engine import EngineStats
from headrace_core.errors import ConfigError, PromptTooLong, QueueFull, RequestError
from headrace_core.reliability import failpoints
from headrace_core.request import CoreRequest
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.contract import KVCacheManager
from headrace_engine.kv_transfer.scheduler import KVTransfer
from headrace_engine.lora.store import no_adapters
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.adapter_slots import SlotPlanner
from headrace_engine.scheduler.batch_builder import BatchBuilder
from headrace_engine.scheduler.batch_plan import StepLimits
from headrace_engine.scheduler.bulk_tokens import BulkTokens
from headrace_engine.scheduler.draft_limits import DraftLimits
from headrace_engine.scheduler.media_ahead import MediaAhead
from headrace_engine.scheduler.media_limits import MediaLimits
from headrace_engine.scheduler.prompt_pace import PromptPace
from headrace_engine.scheduler.request import RequestStatus, SchedulerRequest, StepInFlight
from headrace_engine.scheduler.request_tracker import RequestTracker, output_of

logger = logging.getLogger(__name__)


class Scheduler:
    """The scheduler behind ``scheduler_cls = "default"``. Called from one thread only.

    Args:
        config: resolved (no None in the limits).
        kv: hands out blocks.
        max_model_len: longest sequence, in tokens.
        async_scheduling: whether a step may be scheduled before the previous one's result is
            known; None takes the config's value, and on if that is None too.
        drafts: guesses that steps may check; None: there are none.
        clock: monotonic seconds.
        adapters: hands out slots for low-rank adapters; None: requests have none.
        transfer: moves blocks between the pools and a connector; None: there is none.
        steps_beside: steps that run beside each other, in stages; with ``async_scheduling`` only.

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
        drafts: DraftLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: SlotPlanner | None = None,
        transfer: KVTransfer | None = None,
        steps_beside: int = 1,
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
        if overlapped is False:
            steps_beside = 1
        self._max_steps_in_flight = 1 if overlapped is False else max(2, steps_beside)
        self._tracker = RequestTracker(config, kv, max_model_len, clock, adapters, transfer)
        self._adapters = adapters
        self._transfer = transfer
        kept = (config.max_num_batched_tokens or 0) if config.encoder_share > 0 else 0
        self._ahead = MediaAhead(self._tracker.running, kept)
        self._media = MediaLimits(config, self._ahead)
        self._pace: PromptPace | None = None
        if config.target_itl is not None:
            self._pace = PromptPace(config.target_itl, clock, steps_beside=steps_beside)
        self._builder = BatchBuilder(
            self._tracker,
            kv,
            StepLimits(config, fills_up=not kv.num_blocks, steps_beside=steps_beside),
            self._media,
            drafts,
            transfer,
            self._pace,
        )
        self._counters, self._fair = self._tracker.counters, self._tracker.fair
        self._tokens = BulkTokens(self._tracker)
        self._in_flight: deque[StepInFlight] = deque()
        self._next_step_id = 0

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
        if request.request_id in self._tracker.requests:
            raise RequestError(
                f"request_id = {request.request_id!r}: a request of that id is running; ids must "
                "be unique",
                param="request_id",
                value=request.request_id,
            )
        if request.lora_request is not None and self._adapters is None:
            raise no_adapters()
        self._check_length(request)
        self._media.check(request)
        most = self._config.max_queued_requests
        if most is not None and self._tracker.num_waiting >= most:
            raise QueueFull(
                f"{self._tracker.num_waiting} requests wait already (max_queued_requests = {most})",
                retry_after=self._tracker.admissions.retry_after(self._clock()),
            )
        self._tracker.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """End requests with reason ``abort``; unknown ids are ignored.

        Their blocks are free at once, also those that a step in flight still writes (see the
        module's docstring); results that arrive later are dropped.
        """
        outputs = []
        for request_id in request_ids:
            state = self._tracker.requests.get(request_id)
            if state is not None:
                outputs.append(self._tracker.end(state, "abort"))
        self._tracker.drop_finished()
        return outputs

    def suspend(self, request_ids: Iterable[str]) -> None:
        """Compute nothing of these requests until :meth:`resume`: their readers are behind.

        They hold no blocks and no place in a step meanwhile, so that nobody waits for a slow reader;
        what they had computed is found in the prefix cache again, if others have not needed its blocks.
        Tokens in flight still come. Unknown ids, and those that are suspended, are ignored.
        """
        for state in map(self._tracker.requests.get, request_ids):
            if state is not None and state.status is not RequestStatus.SUSPENDED:
                self._tracker.suspend(state)

    def resume(self, request_ids: Iterable[str]) -> None:
        """Go on with suspended requests, before those that never ran; other ids are ignored."""
        for state in map(self._tracker.requests.get, request_ids):
            if state is not None and state.status is RequestStatus.SUSPENDED:
                self._tracker.resume(state)

    def resume_all(self) -> None:
        """Go on with every suspended request."""
        if self._tracker.num_suspended:
            self.resume(list(self._tracker.requests))

    @property
    def has_unfinished(self) -> bool:
        """True while any request has not ended, suspended ones included."""
        return bool(self._tracker.requests)

    @property
    def is_idle(self) -> bool:
        """True if nothing runs or waits: there are no requests, or all of them are suspended."""
        return len(self._tracker.requests) == self._tracker.num_suspended

    @property
    def num_running(self) -> int:
        return len(self._tracker.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included, and those that wait for their adapter's slot."""
        return self._tracker.num_waiting

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were scheduled and neither updated nor failed."""
        return len(self._in_flight)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None if nothing can run before a step in flight has ended."""
        most_in_flight = 1 if self._builder.quarantined else self._max_steps_in_flight
        if len(self._in_flight) >= most_in_flight:
            return None
        plan = self._builder.fill()
        moves = self._transfer is not None and self._transfer.has_moves
        if not (plan.num_requests or moves) and (self._in_flight or not self._tracker.has_late):
            return None
        # The step of a quarantined request must show what is wrong with it, however long that takes.
        allows_late = not self._builder.quarantined
        step = plan.build(self._next_step_id, self._tracker.gone, allows_late=allows_late)
        if plan.waits:
            step.media_ahead = self._ahead.take_wanted()
        self._tracker.gone = []
        if self._adapters is not None:
            step.placed_adapters = self._adapters.take_placed()
            self._adapters.step_scheduled()
        if self._transfer is not None:
            step.connector_metadata = self._transfer.metadata(step.step_id)
        self._next_step_id += 1
        self._in_flight.append(
            StepInFlight(step.step_id, plan.entries, plan.num_in_order, plan.num_grouped > 0)
        )
        if self._pace is not None:
            self._pace.scheduled(plan)
        if plan.num_requests:
            self._counters.count_step(plan.size - plan.budget)
        return step

    def take_refused(self) -> list[CoreOutput]:
        """Outputs of requests that :meth:`schedule` ended, each once: they raised an error."""
        return self._builder.take_refused()

    def update(
        self, step: ScheduledStep, result: StepResult, told: dict[str, int] | None = None
    ) -> list[CoreOutput]:
        """Take a step's result; one output for each request that got a token or ended.

        Args:
            told: gets the tokens of requests of which there is nothing else to tell, by request; they have
                no output then. None: they have one each.

        Raises:
            RuntimeError: the step is not the oldest in flight, or the result is another step's.
        """
        if result.step_id != step.step_id:
            raise RuntimeError(f"result of step {result.step_id} given for step {step.step_id}")
        num_unfinished = len(self._tracker.requests)
        if result.embedded:
            self._ahead.take_done(result.embedded)
        outputs = self._take_late(result.late) if result.late else []
        if self._transfer is not None:
            outputs += self._take_blocks(self._transfer, step.step_id, result.failed_loads)
        landed = self._land(step)
        entries = landed.entries
        if result.tokens or landed.is_grouped:
            if failpoints.PLAN is not None or self._builder.quarantined:
                told = None
            entries = self._tokens.take(landed, step, result, told)
        find, ended = result.requests.get, RequestStatus.FINISHED
        for state, epoch, samples, num_drafts in entries:
            if state.epoch != epoch or state.status is ended:
                continue
            state.num_steps_in_flight -= 1
            state.num_placeholders -= samples
            part = find(state.request_id)
            if num_drafts:
                self._settle(state, num_drafts, part)
            try:
                output = self._take(state, samples, part, num_drafts)
            except Exception as error:
                output = self._tracker.end_raising(state, error)
            if output is not None:
                outputs.append(output)
        if len(self._tracker.requests) < num_unfinished:
            self._tracker.drop_finished()
            if any(part.not_computed for part in result.requests.values()):
                self._distrust_blocks()
        return outputs

    def fail(self, step: ScheduledStep, message: str) -> list[CoreOutput]:
        """The worker could not execute a step: if it was one request's, that ends with reason
        ``error``; if it was several requests', they will be computed one by one.

        Blocks that the step should have written may already serve as another request's prefix, so
        every cached block is forgotten and every other running request starts again; what they
        have in flight is dropped (nobody has seen those tokens).
        """
        group = self._tracker.decoding
        group.dissolve()
        landed = self._land(step, failed=True)
        entries = landed.with_left(group.take({}) if landed.is_grouped else [])
        concerned = [s for s, epoch, *_ in entries if s.epoch == epoch and not s.finished]
        outputs = []
        if len(entries) == 1:
            outputs += [self._tracker.end(state, "error", error=message) for state in concerned]
        elif concerned:  # one of several, even if the others have ended meanwhile
            logger.warning("%d requests are computed again, one by one", len(concerned))
            self._builder.quarantine(concerned)
        self._tracker.drop_finished()
        self._ahead.forget()
        if self._transfer is not None:
            self._transfer.landed(step.step_id, None)
        self._distrust_blocks()
        if self._adapters is not None:  # once nobody runs
            self._adapters.forget()
        # The worker may not have come to forget whom this step said to. Nobody is left there.
        self._tracker.gone = list(dict.fromkeys([*step.gone_request_ids, *self._tracker.gone]))
        return outputs

    def _distrust_blocks(self) -> None:
        """Blocks may be findable that nothing was written into: forget all, and let every request start
        again, as it may have found some; what is in flight is dropped."""
        self.preempt_all()
        for state in self._tracker.requests.values():
            state.epoch += 1
            state.num_steps_in_flight = state.num_placeholders = state.num_drafts = 0
            state.is_late = False
        if not self._kv.reset_prefix_cache():
            self._kv.forget_prefixes()  # blocks are held for those on their way
        if self._transfer is not None:
            self._transfer.forget_step()

    # -- control -------------------------------------------------------------------------------

    def preempt_all(self) -> None:
        """Send every running request back to the queue; their tokens are kept."""
        self._tracker.preempt_all()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks.

        Args:
            reset_running_requests: preempt whatever holds blocks; it is computed again later.

        Returns:
            False, with nothing changed, if requests hold blocks.
        """
        if reset_running_requests:
            self.preempt_all()
        done = self._kv.reset_prefix_cache()
        if done and self._transfer is not None:
            self._transfer.forget_content()
        return done

    def forget_prefixes(self) -> list[str]:
        """Let no request find what was computed until now: the weights are others. No step may be in
        flight. Requests that run keep what they hold.

        Returns:
            Ids of those that hold something.
        """
        self._kv.forget_prefixes()
        if self._transfer is not None:
            self._transfer.forget_content()
        self._ahead.forget()
        return [one.request_id for one in self._tracker.running if one.num_computed_tokens]

    def forget_adapters(self) -> None:
        """Put adapters into slots again before requests with them run: the model is another one. No request
        may run."""
        if self._adapters is not None:
            self._adapters.forget()

    def stats(self, *, drain: bool = False) -> EngineStats:
        """Counters and gauges, but for ``block_size`` and ``heartbeat_age``, which others know.

        Args:
            drain: empty ``step_tokens`` after copying it.
        """
        counters, kv = self._counters, self._kv
        counters.take_prefix_cache(kv)
        stats = EngineStats(
            num_requests_running=len(self._tracker.running),
            num_requests_waiting=self._tracker.num_waiting,
            num_requests_suspended=self._tracker.num_suspended,
            kv_cache_usage=kv.usage,
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
            num_drafts=counters.drafts.num_drafts,
            num_draft_tokens=counters.drafts.num_draft_tokens,
            num_accepted_per_position=list(counters.drafts.accepted_per_position),
        )
        if drain:
            counters.step_tokens.clear()
        if self._transfer is not None:
            stats.kv_transfer = dict(self._transfer.counters)
        if self._adapters is not None:
            stats.running_loras, stats.waiting_loras = self._tracker.count_adapters()
        return stats

    # -- taking a result -----------------------------------------------------------------------

    def _land(self, step: ScheduledStep, *, failed: bool = False) -> StepInFlight:
        if not self._in_flight or self._in_flight[0].step_id != step.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else None
            raise RuntimeError(f"step {step.step_id} has ended, but {expected} is the oldest")
        if self._adapters is not None:
            self._adapters.step_ended()
        if self._pace is not None:
            self._pace.ended(failed=failed)
        return self._in_flight.popleft()

    def _take_blocks(
        self, transfer: KVTransfer, step_id: int, failed: list[bytes]
    ) -> list[CoreOutput]:
        """Take in the blocks that a step loaded; outputs of requests that end as theirs were not there."""
        transfer.landed(step_id, failed)
        ended = [
            (self._tracker.requests[request_id], count)
            for request_id, count in transfer.failed_requests.items()
        ]
        return [
            self._tracker.end(
                state, "error", error=f"KV transfer: {count} blocks could not be loaded"
            )
            for state, count in ended
        ]

    def _take_late(self, late: Mapping[str, RequestStepResult]) -> list[CoreOutput]:
        """Take tokens that earlier steps left open."""
        outputs = []
        for request_id, result in late.items():
            # Its request may have ended or been preempted since, and a new one have its id.
            state = self._tracker.requests.get(request_id)
            if state is None or not state.is_late:
                continue
            state.is_late = False
            state.num_placeholders -= 1
            try:
                output = self._take(state, True, result)
            except Exception as error:
                output = self._tracker.end_raising(state, error)
            if output is not None:
                outputs.append(output)
        return outputs

    def _settle(
        self, state: SchedulerRequest, num_drafts: int, result: RequestStepResult | None
    ) -> None:
        """A step in flight has ended: its wrong guesses no longer count as computed."""
        state.num_placeholders -= num_drafts
        state.num_drafts -= num_drafts
        num_right = 0 if result is None else max(len(result.token_ids) - 1, 0)
        if state.status is RequestStatus.RUNNING:
            state.num_computed_tokens -= num_drafts - num_right
        if result is not None:
            self._counters.drafts.count(result.num_drafted, num_right)

    def _take(
        self,
        state: SchedulerRequest,
        samples: bool,
        result: RequestStepResult | None,
        num_drafts: int = 0,
    ) -> CoreOutput | None:
        if failpoints.PLAN is not None:
            failpoints.hit("engine.update", state.request_id)
        if result is None:
            return self._tracker.end(
                state, "error", error="the worker returned no result for the request"
            )
        if result.error is not None:
            return self._tracker.end(state, "error", error=result.error)
        if result.dead_end is not None:
            output = self._tracker.end(state, "error")
            output.dead_end = result.dead_end
            return output
        if state.request.pooling is not None:
            return self._take_pooled(state, samples, result)
        is_late = samples and result.is_slow and not result.token_ids
        found = len(result.token_ids)
        if not samples <= found <= samples + num_drafts and not is_late:
            return self._tracker.end(
                state, "error", error=f"the worker returned {found} tokens instead of {samples:d}"
            )
        if state.prompt_logprobs_pending and result.prompt_logprobs:
            state.prompt_logprobs += result.prompt_logprobs
        if not samples:
            return None
        state.goes_by_number = False
        state.is_slow = result.is_slow
        if result.is_slow:
            state.disturb()
        if is_late:
            # Preempted or suspended meanwhile, it samples the token again, unless the next step has
            # been scheduled with it before.
            if state.status is RequestStatus.RUNNING or state.num_steps_in_flight:
                state.is_late = True
                state.num_placeholders += 1
            return None
        if state.num_output_tokens == 0:
            self._counters.prompt_tokens += state.num_prompt_tokens
        if self._builder.quarantined:
            self._builder.clear(state)
        reason = _append(state, result)
        self._counters.generation_tokens += len(result.token_ids)
        if self._fair is not None:
            self._fair.charge(state.request.owner, len(result.token_ids))
        if reason is None:
            output = output_of(state)
        else:
            output = self._tracker.end(state, reason)
            if reason == "stop":
                output.stop_token_id = state.all_token_ids[-1]
        if reason is None and not result.is_slow:
            state.told_epoch = state.epoch
        output.new_token_ids, output.logprobs = result.token_ids, result.logprobs
        output.num_drafted = result.num_drafted
        if state.prompt_logprobs_pending:
            state.prompt_logprobs_pending = False
            output.prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, []
        return output

    def _take_pooled(
        self, state: SchedulerRequest, completes: bool, result: RequestStepResult
    ) -> CoreOutput | None:
        """The end of a pooling request, with the step that completes its prompt."""
        if (result.pooled is not None) != completes:
            found = "no result" if completes else "a result before the prompt was complete"
            return self._tracker.end(state, "error", error=f"the worker returned {found}")
        if not completes:
            return None
        self._counters.prompt_tokens += state.num_prompt_tokens
        if self._builder.quarantined:
            self._builder.clear(state)
        output = self._tracker.end(state, "stop")
        output.pooled = result.pooled
        return output

    def _check_length(self, request: CoreRequest) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise RequestError("prompt: must hold at least one token", param="prompt")
        if request.pooling is not None:
            self._check_pooling_length(num_prompt_tokens, request.num_encoder_tokens)
            return
        if num_prompt_tokens >= self._max_model_len:
            raise PromptTooLong(self._max_model_len, num_prompt_tokens, 1)
        # The last token is never fed back, so it needs no place in the cache.
        needed = min(num_prompt_tokens + request.max_tokens, self._max_model_len) - 1
        states = request.num_encoder_tokens
        if not self._kv.fits(needed, states):
            encoded = f" and {states} encoder states" if states else ""
            raise RequestError(
                f"prompt of {num_prompt_tokens} tokens with max_tokens = {request.max_tokens} "
                f"needs {needed} tokens{encoded} of KV cache; the whole cache holds "
                f"{self._capacity(states)}",
                param="max_tokens",
                value=request.max_tokens,
            )

    def _check_pooling_length(self, num_prompt_tokens: int, num_encoder_tokens: int) -> None:
        if num_prompt_tokens > self._max_model_len:
            raise PromptTooLong(self._max_model_len, num_prompt_tokens)
        if not self._kv.fits(num_prompt_tokens, num_encoder_tokens):
            raise RequestError(
                f"prompt of {num_prompt_tokens} tokens; the whole KV cache holds "
                f"{self._capacity(num_encoder_tokens)}",
                param="prompt",
                value=num_prompt_tokens,
            )

    def _capacity(self, num_encoder_tokens: int) -> int:
        """Longest sequence that fits, in tokens (for messages: it asks a few times)."""
        return bisect.bisect_left(
            range(1, self._max_model_len + 1),
            True,
            key=lambda length: not self._kv.fits(length, num_encoder_tokens),
        )


def _append(state: SchedulerRequest, result: RequestStepResult) -> str | None:
    """Append a step's tokens up to the one that ends the output; why that does, or None. What comes behind
    it is taken off the result."""
    token_ids = result.token_ids
    if len(token_ids) == 1:
        state.all_token_ids.extend(token_ids)
        return state.token_finish_reason
    for index, token_id in enumerate(token_ids):
        state.all_token_ids.append(token_id)
        reason = state.token_finish_reason
        if reason is not None:
            del token_ids[index + 1 :]
            if result.logprobs is not None:
                del result.logprobs[index + 1 :]
            return reason
    return None
