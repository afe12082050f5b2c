"""One request's output while it grows.

The state takes every step's result at once and hands out a :class:`RequestOutput` only when asked
(:meth:`StreamState.take`). A consumer that asks rarely gets everything since the last time in one
output, so nothing queues up; and the engine suspends a request of which much was not taken
(:attr:`StreamState.num_untaken_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace_core.lora import LoRARequest
from headrace_core.output import (
    CompletionOutput,
    FlatLogprobs,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    StepTimes,
)
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_core.step import TokenLogprobs
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.messages import CoreOutput
from headrace_engine.output_processing.detokenizer import Detokenizer, make_detokenizer
from headrace_engine.output_processing.logprobs import (
    HeldTokens,
    TokenBytes,
    TokenText,
    append_position,
    new_logprobs,
    prompt_logprobs,
    split,
)
from headrace_engine.output_processing.stop import StopFinder
from headrace_engine.output_processing.unread_tokens import UnreadTokens
from headrace_engine.output_processing.versions_seen import VersionsSeen

TOKEN_BYTES = 64
"""Memory of an output's token, about: its id and its text."""
ENTRY_BYTES = 256
"""Memory of a log-probability, about: the entry, its number, its text and its place in a mapping."""


class CompletionState:
    """One completion: its tokens, its text, and how much of both has been handed out."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        text_of: TokenText,
        bytes_of: TokenBytes,
        lora_request: LoRARequest | None = None,
    ) -> None:
        self.index = index
        self._lora_request = lora_request
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._dead_end: str | None = None
        """The reason for which the request's own parameters left no next token, if they did."""
        self.started = False
        """True if the core has said anything of it."""
        self._params = params
        self._detokenizer = detokenizer
        self._text_of = text_of
        self._bytes_of = bytes_of if detokenizer is None else detokenizer.would_add
        self._stops = StopFinder(params.stop_strings, params.include_stop_str_in_output)
        self._seeks_stops = detokenizer is not None and bool(params.stop_strings)
        self._text = ""
        self._new_text: list[str] = []
        self._num_decoded = 0
        """Tokens whose text is in ``_new_text``, or was."""
        self._logprobs = new_logprobs(params.flat_logprobs) if params.wants_logprobs else None
        self._held = HeldTokens() if self._seeks_stops and self._logprobs is not None else None
        self._num_entries = 0
        """Log-probabilities that came since the last output."""
        self._cumulative_logprob = 0.0
        self._sent_tokens = 0
        self._sent_finish = False

    @property
    def num_untaken_bytes(self) -> int:
        """Memory that takes what was not handed out, about."""
        num_tokens = len(self.token_ids) - self._sent_tokens
        return num_tokens * TOKEN_BYTES + self._num_entries * ENTRY_BYTES

    @property
    def is_plain(self) -> bool:
        """True if tokens that come need only be appended; False: each is looked at."""
        return not self._seeks_stops

    @property
    def ended(self) -> bool:
        """True if no more will come."""
        return self.finish_reason is not None

    def update(self, output: CoreOutput) -> bool:
        """Take a step's tokens.

        Returns:
            True if a stop string ended the completion here, before the core did.
        """
        ids, end = output.new_token_ids, output.stop_token_id
        if end is not None:
            ids = ids[:-1]
        if self._seeks_stops or (self._logprobs is not None and output.logprobs):
            for position, token_id in enumerate(ids):
                self._add(token_id, output.logprobs[position] if output.logprobs else None)
                if self.finish_reason is not None:
                    return output.finish_reason is None
        else:
            # Nobody needs the text before it is handed out.
            self.token_ids += ids
        if end is not None:
            self._end_with(end, output.logprobs[-1] if output.logprobs else None)
        elif output.finish_reason is not None:
            self._dead_end = output.dead_end
            self._finish(output.finish_reason, output.dead_end)
        return False

    def add_token(self, token_id: int) -> bool:
        """:meth:`update` for one token of which nothing else is said."""
        if not self._seeks_stops:
            self.token_ids.append(token_id)
            return False
        self._add(token_id, None)
        return self.finish_reason is not None

    def end(self, finish_reason: str) -> None:
        """End it from outside."""
        if self.finish_reason is None:
            self._finish(finish_reason, None)

    def ready(self, interval: int) -> bool:
        """True if there is enough to hand out: the first token, ``interval`` more, the end."""
        if self.finish_reason is not None:
            return not self._sent_finish
        new = self._num_certain - self._sent_tokens
        return new > 0 and (self._sent_tokens == 0 or new >= interval)

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        self._decode()
        self._text += "".join(self._new_text)
        ids = list(self.token_ids)
        return self._output(self._text, ids, _copy_logprobs(self._logprobs), len(ids))

    def delta(self) -> CompletionOutput:
        """The output since the last call."""
        logprobs, end = self._logprobs, self._num_certain
        new = end - self._sent_tokens
        if logprobs is not None:
            if len(logprobs) > new:
                logprobs, self._logprobs = split(logprobs, new)
            else:
                self._logprobs = new_logprobs(isinstance(logprobs, FlatLogprobs))
        if self._held is not None:
            self._held.hand_out(new)
        self._decode()
        ids = self.token_ids[self._sent_tokens : end]
        return self._output("".join(self._new_text), ids, logprobs, end)

    def text_delta(self) -> tuple[str, int]:
        """Text and number of tokens that are new since the last call: all that :meth:`delta` would
        say while the completion goes on."""
        self._decode()
        text = "".join(self._new_text)
        self._new_text.clear()
        new = len(self.token_ids) - self._sent_tokens
        self._sent_tokens += new
        return text, new

    @property
    def _num_certain(self) -> int:
        """Tokens whose text no stop string can cut off any more; all, if nobody asks of each."""
        if self._held is None or self.finish_reason is not None:
            return len(self.token_ids)
        return self._sent_tokens + self._held.num_certain

    def _output(
        self, text: str, token_ids: list[int], logprobs: Logprobs | None, num_sent: int
    ) -> CompletionOutput:
        self._new_text.clear()
        self._sent_tokens = num_sent
        self._num_entries = 0
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
            self._lora_request,
        )

    def _add(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take a token; end the completion if it completes a stop string."""
        self.token_ids.append(token_id)
        self._num_decoded += 1
        detokenizer = self._detokenizer
        if detokenizer is None:
            self._add_logprobs(logprobs, self._bytes_of(token_id), self._bytes_of)
            return
        # The others first: what they would have added depends on what was there before this token.
        others = {} if logprobs is None else {i: self._bytes_of(i) for i in logprobs.token_ids}
        found, piece = detokenizer.feed_one(token_id)
        self._add_logprobs(logprobs, piece, others.__getitem__)
        if not self._seeks_stops:
            self._new_text.append(found)
            return
        may_stop = len(self.token_ids) >= self._params.min_tokens
        text, stop = self._stops.feed(found, may_stop=may_stop)
        self._new_text.append(text)
        if self._held is not None:
            self._held.add(piece, found, inside=detokenizer.inside)
            self._held.show(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            self._cut_logprobs()

    def _add_logprobs(
        self, logprobs: TokenLogprobs | None, piece: bytes | None, others: TokenBytes
    ) -> None:
        if logprobs is not None and self._logprobs is not None:
            append_position(self._logprobs, logprobs, self._text_of, piece, others)
            self._cumulative_logprob += logprobs.logprobs[0]
            self._num_entries += len(logprobs.token_ids)

    def _cut_logprobs(self) -> None:
        if self._held is not None and self._logprobs is not None:
            self._held.cut(self._logprobs)

    def _decode(self) -> None:
        """Text of the tokens that came since the last time."""
        if self._detokenizer is not None and self._num_decoded < len(self.token_ids):
            self._new_text.append(self._detokenizer.feed(self.token_ids[self._num_decoded :]))
            self._num_decoded = len(self.token_ids)

    def _end_with(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take the token that ends the completion. No stop string is sought in its text."""
        named = token_id in (self._params.stop_token_ids or ())
        self.finish_reason, self.stop_reason = "stop", token_id if named else None
        detokenizer = self._detokenizer
        if detokenizer is None:
            self.token_ids.append(token_id)
            self._add_logprobs(logprobs, self._bytes_of(token_id), self._bytes_of)
            return
        self._decode()
        self._new_text.append(self._stops.finish())
        others = {} if logprobs is None else {i: self._bytes_of(i) for i in logprobs.token_ids}
        text, piece = detokenizer.feed_one(token_id) if self._shows_end(named) else ("", b"")
        text += detokenizer.finish()
        self.token_ids.append(token_id)
        self._num_decoded += 1
        self._new_text.append(text)
        self._add_logprobs(logprobs, piece, others.__getitem__)
        if self._held is not None:
            self._held.add(piece, text, inside=False)

    def _shows_end(self, named: bool) -> bool:
        """True if the text of the token that ends the completion is shown if that token is not special:
        of special ones the detokenizer knows. The model's own end tokens count as special."""
        params = self._params
        return named or params.include_stop_str_in_output or not params.skip_special_tokens

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
            return
        self.finish_reason, self.stop_reason = "stop", stop
        if self._held is not None:
            self._held.show(text)
        self._cut_logprobs()


class StreamState:
    """One request with its ``n`` completions.

    Args:
        request: as taken in.
        tokenizer: None: outputs have no text.
        stream_interval: tokens per streamed output; the first and the last come at once.
        text_of: one token's text, for log-probabilities.
        bytes_of: one token's own bytes, for those of prompts and of outputs without text.
    """

    def __init__(
        self,
        request: PreparedRequest,
        tokenizer: Tokenizer | None,
        stream_interval: int = 1,
        text_of: TokenText | None = None,
        bytes_of: TokenBytes | None = None,
    ) -> None:
        text_of, bytes_of = text_of or _nothing, bytes_of or _nothing
        self.request = request
        self.error: BaseException | None = None
        """Set if the request failed; what was generated before can still be taken."""
        params = request.params
        self._text_of, self._bytes_of = text_of, bytes_of
        self._interval = stream_interval
        self._kind = params.output_kind
        self.tells_end_only = self._kind is RequestOutputKind.FINAL_ONLY
        """True if there is nothing to take before everything has ended."""
        self._completions = {
            core.request_id: CompletionState(
                index,
                params,
                _detokenizer(tokenizer, request),
                text_of,
                bytes_of,
                request.lora_request,
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
        self._unread: UnreadTokens | None = None
        """Keeps tokens that have come and that nobody has asked for yet; None: there are none."""
        self.unread_since = self.unread_column = 0
        """See :class:`headrace_engine.output_processing.unread_tokens.TokenReader`."""
        self.weights_versions = VersionsSeen()
        self.is_plain = self._only is not None and self._only.is_plain
        """True of a request with one completion of which nobody asks more than its tokens before it is handed
        out: further ones are appended. False once it has ended, too."""
        self._num_cached_tokens = 0
        self._kv_transfer_params: dict[str, Any] | None = None
        self._num_preemptions: dict[str, int] = {}
        self._taken_finished = False
        self.num_takes = 0
        self.on_taken: Callable[[], None] | None = None
        """Called once, when the next output has been taken."""
        self.num_waiting = len(self._list)
        """Completions that run, and of which the core has said nothing yet."""

    @property
    def metrics(self) -> RequestMetrics:
        """Times and counts, of all tokens so far."""
        self.read_unread()
        return self._metrics

    @property
    def finished(self) -> bool:
        """True if every completion has ended."""
        if self._only is not None:
            return self._only.finish_reason is not None
        return all(c.ended for c in self._list)

    @property
    def unfinished_core_ids(self) -> list[str]:
        """Core requests that must be aborted if the request ends now."""
        return [i for i, c in self._completions.items() if not c.ended]

    def update(self, output: CoreOutput, timestamp: float, weights_version: str = "") -> bool:
        """Take in what a step did for one completion.

        Args:
            weights_version: of the weights that computed it; "": not known.

        Returns:
            True if the completion ended here (by a stop string) and the core does not know yet.
        """
        completion = self._only or self._completions[output.request_id]
        if completion.finish_reason is not None:
            return False
        self.read_unread(last=output.finish_reason is not None)
        if not completion.started:
            self._start(completion, output)
        metrics = self.metrics
        if output.new_token_ids:
            metrics.first_token_ts = metrics.first_token_ts or timestamp
            metrics.last_token_ts = timestamp
            metrics.num_generation_tokens += len(output.new_token_ids)
            if weights_version not in self.weights_versions.all:  # seldom
                self.weights_versions.see(weights_version)
            if output.num_drafted:
                metrics.num_draft_tokens += output.num_drafted
                metrics.num_accepted_tokens += len(output.new_token_ids) - 1
        if output.finish_reason is not None:
            self.is_plain = False
        if output.kv_transfer_params is not None:
            self._kv_transfer_params = output.kv_transfer_params
        if output.num_preemptions:
            self._num_preemptions[output.request_id] = output.num_preemptions
            metrics.num_preemptions = sum(self._num_preemptions.values())
        if output.prompt_logprobs is not None:
            flat = self.request.params.flat_logprobs
            self._prompt_logprobs = prompt_logprobs(
                output.prompt_logprobs, flat, self._text_of, self._bytes_of
            )
        return completion.update(output)

    def add_token(
        self, core_id: str, token_id: int, timestamp: float, weights_version: str
    ) -> bool:
        """:meth:`update` for one token of a completion of which there is nothing else to tell; it has had
        tokens before."""
        completion = self._only or self._completions[core_id]
        if completion.finish_reason is not None:
            return False
        self.read_unread()
        metrics = self.metrics
        metrics.last_token_ts = timestamp
        metrics.num_generation_tokens += 1
        if weights_version not in self.weights_versions.all:  # seldom
            self.weights_versions.see(weights_version)
        return completion.add_token(token_id)

    def add_plain(self, token_id: int, timestamp: float) -> None:
        """:meth:`add_token` while the request :attr:`is_plain`, by weights that it has seen."""
        self._list[0].token_ids.append(token_id)
        metrics = self._metrics
        metrics.last_token_ts = timestamp
        metrics.num_generation_tokens += 1

    def read_later(self, unread: UnreadTokens, core_id: str) -> None:
        """Have further tokens kept until they are asked for, while the request :attr:`is_plain`."""
        self._unread = unread
        unread.add(core_id, self)

    def read_unread(self, *, last: bool = False) -> None:
        """Take the tokens that are kept, if some are.

        Args:
            last: none are kept from now on.
        """
        unread = self._unread
        if unread is None:
            return
        core_id = self.request.core_requests[0].request_id
        if last:
            self._unread = None
            unread.remove(core_id)
        else:
            unread.read(core_id)

    def take_unread(self, token_ids: Sequence[int], last_timestamp: float) -> None:
        """See :class:`headrace_engine.output_processing.unread_tokens.TokenReader`."""
        self._list[0].token_ids += token_ids
        self._metrics.last_token_ts = last_timestamp
        self._metrics.num_generation_tokens += len(token_ids)

    def add_step(self, times: StepTimes) -> None:
        """A step took so long, of which any completion was part; before its outputs."""
        if not self.finished:
            metrics = self._metrics
            metrics.step_times = metrics.step_times.plus(times) if metrics.step_times else times

    def end(self, finish_reason: str) -> None:
        """End every completion that still runs."""
        self.read_unread(last=True)
        for completion in self._list:
            completion.end(finish_reason)
        self.num_waiting = 0
        self.is_plain = False

    @property
    def ready(self) -> bool:
        """True if :meth:`take` would return an output."""
        if self._taken_finished:
            return False
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self.finished
        if self._only is not None:
            return self._only.ready(self._interval)
        return any(c.ready(self._interval) for c in self._list)

    @property
    def exhausted(self) -> bool:
        """True if the last output was taken."""
        return self._taken_finished

    @property
    def num_untaken_bytes(self) -> int:
        """Memory of the tokens that nobody has taken, about, if outputs hold what is new; 0 for others,
        which keep everything to the end."""
        if self._kind is not RequestOutputKind.DELTA:
            return 0
        return sum(c.num_untaken_bytes for c in self._list)

    def take(self) -> RequestOutput | None:
        """Everything since the last call, as the output kind asks; None if that is too little."""
        if not self.ready:
            return None
        self.read_unread()
        self._tell_taken()
        self._taken_finished = self.finished
        if self._kind is RequestOutputKind.DELTA:
            if self._only is not None:
                return self._output([self._only.delta()], self._take_prompt_logprobs())
            ready = [c for c in self._list if c.ready(self._interval)]
            return self._output([c.delta() for c in ready], self._take_prompt_logprobs())
        return self._output([c.whole() for c in self._list], self._prompt_logprobs)

    def take_text(self) -> tuple[str, int] | None:
        """The text that :meth:`take` would give, if that is only text of so many tokens; else None."""
        only = self._only
        if (
            only is None
            or not self._text_only
            or only.finish_reason is not None
            or self.error is not None
            or not only.ready(self._interval)
        ):
            return None
        self._tell_taken()
        return only.text_delta()

    def _tell_taken(self) -> None:
        self.num_takes += 1
        if self.on_taken is not None:
            on_taken, self.on_taken = self.on_taken, None
            on_taken()

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
            _copy(self.metrics),
            self._num_cached_tokens,
            self.request.lora_request,
            self.weights_versions.all,
            self._kv_transfer_params,
        )

    def _start(self, completion: CompletionState, output: CoreOutput) -> None:
        """The core speaks of a completion for the first time."""
        completion.started = True
        self.num_waiting -= 1
        metrics = self.metrics
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
        list(logprobs.token_bytes),
    )


def _nothing(_: int) -> None:
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
        metrics.num_draft_tokens,
        metrics.num_accepted_tokens,
    )
