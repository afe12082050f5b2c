"""One request's output while it grows.

The state takes every step's result at once and hands out a :class:`RequestOutput` only when asked
(:meth:`RequestState.take`). A consumer that asks rarely gets everything since the last time in one
output, so nothing queues up: what a slow reader costs is the output itself, once.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_core.output import (
    CompletionOutput,
    FlatLogprobs,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    StepTimes,
)
from headrace_core.sampling import RequestOutputKind, SamplingParams
from headrace_core.text import Tokenizer
from headrace_engine.emission.detokenizer import Detokenizer, make_detokenizer
from headrace_engine.emission.logprobs import (
    TokenText,
    append_position,
    new_logprobs,
    prompt_logprobs,
)
from headrace_engine.emission.stop import StopFinder
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.messages import CoreOutput


class CompletionState:
    """One completion: its tokens, its text, and how much of both has been handed out."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        text_of: TokenText,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._dead_end: str | None = None
        """Why the request's own parameters left no next token, if they did not."""
        self.started = False
        """Whether the core has said anything of it."""
        self._params = params
        self._detokenizer = detokenizer
        self._text_of = text_of
        self._stops = StopFinder(params.stop_strings, params.include_stop_str_in_output)
        self._seeks_stops = detokenizer is not None and bool(params.stop_strings)
        self._text = ""
        self._new_text: list[str] = []
        self._num_decoded = 0
        """Tokens whose text is in ``_new_text``, or was."""
        self._logprobs = new_logprobs(params.flat_logprobs) if params.wants_logprobs else None
        self._cumulative_logprob = 0.0
        self._sent_tokens = 0
        self._sent_finish = False

    @property
    def ended(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None

    def update(self, output: CoreOutput) -> bool:
        """Take a step's tokens.

        Returns:
            True if a stop string ended the completion here, before the core did.
        """
        if self._seeks_stops:
            for position, token_id in enumerate(output.new_token_ids):
                self._add_logprobs(output, position)
                self._add_and_seek(token_id)
                if self.finish_reason is not None:
                    return output.finish_reason is None
        else:
            # Without stop strings nobody needs the text before it is handed out.
            self.token_ids += output.new_token_ids
            if output.logprobs:
                for position in range(len(output.new_token_ids)):
                    self._add_logprobs(output, position)
        if output.finish_reason is not None:
            self._dead_end = output.dead_end
            reason = self._reason(output.stop_token_id)
            self._finish(
                output.finish_reason, reason if output.dead_end is None else output.dead_end
            )
        return False

    def end(self, finish_reason: str) -> None:
        """End it from outside."""
        if self.finish_reason is None:
            self._finish(finish_reason, None)

    def ready(self, interval: int) -> bool:
        """Whether there is enough news to hand out: the first token, ``interval`` more, the end."""
        if self.finish_reason is not None:
            return not self._sent_finish
        new = len(self.token_ids) - self._sent_tokens
        return new > 0 and (self._sent_tokens == 0 or new >= interval)

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        self._decode()
        self._text += "".join(self._new_text)
        return self._output(self._text, list(self.token_ids), _copy_logprobs(self._logprobs))

    def delta(self) -> CompletionOutput:
        """What is new since the last call."""
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = new_logprobs(isinstance(logprobs, FlatLogprobs))
        self._decode()
        return self._output("".join(self._new_text), self.token_ids[self._sent_tokens :], logprobs)

    def text_delta(self) -> tuple[str, int]:
        """Text and number of tokens that are new since the last call: all that :meth:`delta` would
        say while the completion goes on."""
        self._decode()
        text = "".join(self._new_text)
        self._new_text.clear()
        new = len(self.token_ids) - self._sent_tokens
        self._sent_tokens += new
        return text, new

    def _output(
        self, text: str, token_ids: list[int], logprobs: Logprobs | None
    ) -> CompletionOutput:
        self._new_text.clear()
        self._sent_tokens = len(self.token_ids)
        self._sent_finish = self.finish_reason is not None
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            None if logprobs is None else self._cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self._dead_end,
        )

    def _add_logprobs(self, output: CoreOutput, position: int) -> None:
        if output.logprobs and self._logprobs is not None:
            logprobs = output.logprobs[position]
            append_position(self._logprobs, logprobs, self._text_of)
            self._cumulative_logprob += logprobs.logprobs[0]

    def _add_and_seek(self, token_id: int) -> None:
        """Take a token; end the completion if it completes a stop string."""
        assert self._detokenizer is not None
        self.token_ids.append(token_id)
        self._num_decoded += 1
        may_stop = len(self.token_ids) >= self._params.min_tokens
        text, stop = self._stops.feed(self._detokenizer.feed((token_id,)), may_stop=may_stop)
        self._new_text.append(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _decode(self) -> None:
        """Text of the tokens that came since the last time."""
        if self._detokenizer is not None and self._num_decoded < len(self.token_ids):
            self._new_text.append(self._detokenizer.feed(self.token_ids[self._num_decoded :]))
            self._num_decoded = len(self.token_ids)

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._detokenizer is None:
            return
        self._decode()
        # An incomplete character at the end becomes U+FFFD, which no stop string holds.
        text, stop = self._stops.feed(self._detokenizer.finish())
        self._new_text.append(text)
        if stop is None:
            self._new_text.append(self._stops.finish())
        else:
            self.finish_reason, self.stop_reason = "stop", stop

    def _reason(self, stop_token_id: int | None) -> int | None:
        """The stop token if the caller named it; None for the model's own end tokens."""
        named = self._params.stop_token_ids or ()
        return stop_token_id if stop_token_id in named else None


class RequestState:
    """One request with its ``n`` completions.

    Args:
        request: as taken in.
        tokenizer: None: outputs have no text.
        stream_interval: tokens per streamed output; the first and the last come at once.
        text_of: one token's text, for log-probabilities.
    """

    def __init__(
        self,
        request: PreparedRequest,
        tokenizer: Tokenizer | None,
        stream_interval: int = 1,
        text_of: TokenText | None = None,
    ) -> None:
        text_of = text_of or _no_text
        self.request = request
        self.error: BaseException | None = None
        """Set if the request failed; what was generated before can still be taken."""
        params = request.params
        self._text_of = text_of
        self._interval = stream_interval
        self._kind = params.output_kind
        self._completions = {
            core.request_id: CompletionState(
                index, params, _detokenizer(tokenizer, request), text_of
            )
            for index, core in enumerate(request.core_requests)
        }
        self._list = list(self._completions.values())
        self._only = self._list[0] if len(self._list) == 1 else None
        """The completion, where there is just one: the short way."""
        self._text_only = (
            self._only is not None
            and self._kind is RequestOutputKind.DELTA
            and not params.wants_logprobs
            and params.prompt_logprobs is None
        )
        self._prompt_logprobs: Logprobs | None = None
        self._metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._num_cached_tokens = 0
        self._num_preemptions: dict[str, int] = {}
        self._taken_finished = False
        self.num_waiting = len(self._list)
        """Completions that run, and of which the core has said nothing yet."""

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        if self._only is not None:
            return self._only.finish_reason is not None
        return all(c.ended for c in self._list)

    @property
    def unfinished_core_ids(self) -> list[str]:
        """Core requests that must be aborted if the request ends now."""
        return [i for i, c in self._completions.items() if not c.ended]

    def update(self, output: CoreOutput, timestamp: float) -> bool:
        """Take in what a step did for one completion.

        Returns:
            True if the completion ended here (by a stop string) and the core does not know yet.
        """
        completion = self._only or self._completions[output.request_id]
        if completion.finish_reason is not None:
            return False
        if not completion.started:
            self._start(completion, output)
        metrics = self._metrics
        if output.new_token_ids:
            metrics.first_token_ts = metrics.first_token_ts or timestamp
            metrics.last_token_ts = timestamp
            metrics.num_generation_tokens += len(output.new_token_ids)
        if output.num_preemptions:
            self._num_preemptions[output.request_id] = output.num_preemptions
            metrics.num_preemptions = sum(self._num_preemptions.values())
        if output.prompt_logprobs is not None:
            flat = self.request.params.flat_logprobs
            self._prompt_logprobs = prompt_logprobs(output.prompt_logprobs, flat, self._text_of)
        return completion.update(output)

    def add_step(self, times: StepTimes) -> None:
        """A step took so long, of which any completion was part; before its outputs."""
        if not self.finished:
            metrics = self._metrics
            metrics.step_times = metrics.step_times.plus(times) if metrics.step_times else times

    def end(self, finish_reason: str) -> None:
        """End every completion that still runs."""
        for completion in self._list:
            completion.end(finish_reason)
        self.num_waiting = 0

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` would return an output."""
        if self._taken_finished:
            return False
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self.finished
        if self._only is not None:
            return self._only.ready(self._interval)
        return any(c.ready(self._interval) for c in self._list)

    @property
    def exhausted(self) -> bool:
        """Whether the last output was taken."""
        return self._taken_finished

    def take(self) -> RequestOutput | None:
        """Everything since the last call, as the output kind asks; None if that is too little."""
        if not self.ready:
            return None
        self._taken_finished = self.finished
        if self._kind is RequestOutputKind.DELTA:
            if self._only is not None:
                return self._output([self._only.delta()], self._take_prompt_logprobs())
            ready = [c for c in self._list if c.ready(self._interval)]
            return self._output([c.delta() for c in ready], self._take_prompt_logprobs())
        return self._output([c.whole() for c in self._list], self._prompt_logprobs)

    def take_text(self) -> tuple[str, int] | None:
        """What :meth:`take` would give, if that is only text of so many tokens; else None."""
        only = self._only
        if (
            only is None
            or not self._text_only
            or only.finish_reason is not None
            or self.error is not None
            or not only.ready(self._interval)
        ):
            return None
        return only.text_delta()

    def _take_prompt_logprobs(self) -> Logprobs | None:
        logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return logprobs

    def _output(
        self, completions: list[CompletionOutput], prompt_logprobs: Logprobs | None
    ) -> RequestOutput:
        if self.error is not None:
            for completion in completions:
                if completion.finish_reason == "error":
                    completion.error = str(self.error)
        return RequestOutput(
            self.request.request_id,
            self.request.prompt,
            self.request.prompt_token_ids,
            completions,
            self._taken_finished,
            prompt_logprobs,
            _copy(self._metrics),
            self._num_cached_tokens,
        )

    def _start(self, completion: CompletionState, output: CoreOutput) -> None:
        """The core speaks of a completion for the first time."""
        completion.started = True
        self.num_waiting -= 1
        metrics = self._metrics
        metrics.queued_ts = metrics.queued_ts or output.queued_ts
        metrics.scheduled_ts = metrics.scheduled_ts or output.scheduled_ts
        if completion.index == 0:
            # The siblings' hits are the first completion's own prompt.
            self._num_cached_tokens = output.num_cached_tokens


def _detokenizer(tokenizer: Tokenizer | None, request: PreparedRequest) -> Detokenizer | None:
    if tokenizer is None or not request.params.detokenize:
        return None
    context: Sequence[int] = request.prompt_token_ids
    if request.core_requests and request.core_requests[0].prompt_embeds is not None:
        context = tokenizer.encode("a", add_special_tokens=False)  # outputs continue some text
    return make_detokenizer(tokenizer, request.params, context)


def _copy_logprobs(logprobs: Logprobs | None) -> Logprobs | None:
    if not isinstance(logprobs, FlatLogprobs):
        return None if logprobs is None else list(logprobs)
    return FlatLogprobs(
        list(logprobs.start_indices),
        list(logprobs.end_indices),
        list(logprobs.token_ids),
        list(logprobs.logprobs),
        list(logprobs.ranks),
        list(logprobs.decoded_tokens),
    )


def _no_text(_: int) -> str | None:
    return None


def _copy(metrics: RequestMetrics) -> RequestMetrics:
    return RequestMetrics(
        metrics.arrival_time,
        metrics.queued_ts,
        metrics.scheduled_ts,
        metrics.first_token_ts,
        metrics.last_token_ts,
        metrics.num_generation_tokens,
        metrics.num_preemptions,
        metrics.step_times,
    )
