"""A scriptable engine without a model, for tests of whatever sits on an ``EngineClient``.

Its vocabulary is Unicode: token id = code point, so every text has obvious ids, lengths are
lengths, and streaming goes character by character. What it answers, how fast, and when it fails
are constructor arguments; what it was asked is in :attr:`FakeEngine.requests`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace_core.arrays import PackedArray
from headrace_core.engine import AdmissionTicket, Encode, EngineStats, Generate, TokenizedPrompt
from headrace_core.errors import (
    EngineDead,
    GenerateError,
    PromptTooLong,
    QueueFull,
    RequestError,
    UnsupportedFeature,
)
from headrace_core.lora import LoRARequest
from headrace_core.output import (
    BeamSearchOutput,
    BeamSequence,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    Logprobs,
    PoolingOutput,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    StepTimes,
)
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor
from headrace_core.pooling.scoring import ScoreInput, pair_up
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import AudioClip, SpeechModel
from headrace_core.speech.transcription import Transcript, TranscriptionParams, TranscriptPiece
from headrace_testing.fakes.pooling import fake_pooled, fake_score
from headrace_testing.fakes.transcription import FakeTranscription

BOS, EOS = 0x110000, 0x110001
FAKE_VOCAB_SIZE = 0x110002

Reply = str | Sequence[str] | Callable[[str, int], str]
"""Reply of the fake: one text, one per completion, or a function of (prompt text, index)."""


def fake_served_model(**changes: Any) -> ServedModel:
    """A :class:`ServedModel` for tests; ``changes`` replace fields."""
    model = ServedModel(
        name="fake-model",
        names=("fake-model",),
        root="fake-model",
        architecture="FakeForCausalLM",
        max_model_len=4096,
        vocab_size=FAKE_VOCAB_SIZE,
        max_logprobs=20,
        eos_token_ids=(EOS,),
        tasks=("generate",),
        has_tokenizer=True,
        has_chat_template=True,
        default_sampling_params={},
    )
    return replace(model, **changes)


def render_fake_chat(prompt: ChatPrompt) -> str:
    """The fake's chat template: ``<role>text</role>`` per message, then ``<assistant>``."""
    text = "".join(f"<{m['role']}>{_content(m)}</{m['role']}>" for m in prompt.messages)
    if prompt.continue_final_message:
        return text.rsplit("</", 1)[0]
    return text + ("<assistant>" if prompt.add_generation_prompt else "")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """Arguments of one ``generate`` call."""

    prompt: Prompt
    prompt_text: str
    params: SamplingParams
    request_id: str
    priority: int
    add_special_tokens: bool | None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class RecordedSearch:
    """The arguments of one ``beam_search`` call."""

    prompt: Prompt
    params: BeamSearchParams
    request_id: str
    priority: int
    add_special_tokens: bool | None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class RecordedPooling:
    """Arguments of one ``encode`` call, or of one pair of a ``score`` call."""

    prompt: Any
    """Prompt; for a pair, both sides."""
    prompt_text: str
    params: PoolingParams
    """Verified."""
    request_id: str
    task: str
    priority: int
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    entry: AdmissionTicket | None = field(default=None, compare=False)
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class _Completion:
    """One completion while it is written. ``sent`` counts what deltas already carried."""

    index: int
    planned: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    sent_tokens: int = 0
    sent_chars: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reported: bool = False


class FakeEngine:
    """An :class:`~headrace_core.engine.EngineClient` that plays a script.

    Args:
        reply: what it says (then EOS); see :data:`Reply`. Default: ``You said: <prompt>``.
        model: facts to report; see :func:`fake_served_model`.
        tokens_per_output: characters per streamed output; a function is asked before each.
        first_delay, delay: seconds before the first and before each further output.
        gate: if given, awaited before each output (tests hold it to keep requests running).
        reject: raised on first iteration of every request (a RequestError, say).
        fail_after: this many outputs, then GenerateError (per request).
        die_after: this many outputs over all requests, then the engine is dead.
        max_running: more concurrent requests raise QueueFull.
        cached_tokens: reported as ``num_cached_tokens`` (at most the prompt's length - 1).
        step_times: reported in the metrics.
        pushes: whether iterators are :class:`~headrace_core.engine.OutputStream` objects.
        speech, io_processor: what the properties of these names give.
        adapters: those that are known, by id; front ends of one engine share them. A model whose
            ``max_loras`` is 0 takes none.
        kv_transfer_params: of every last output.

    Pooled results are those of :mod:`headrace_testing.fakes.pooling`, transcripts those of
    :mod:`headrace_testing.fakes.transcription`.
    """

    def __init__(
        self,
        reply: Reply | None = None,
        *,
        model: ServedModel | None = None,
        tokens_per_output: int | Callable[[], int] = 1,
        first_delay: float = 0.0,
        delay: float = 0.0,
        gate: asyncio.Event | None = None,
        reject: BaseException | None = None,
        fail_after: int | None = None,
        die_after: int | None = None,
        max_running: int | None = None,
        cached_tokens: int = 0,
        step_times: StepTimes | None = None,
        pushes: bool = True,
        speech: SpeechModel | None = None,
        io_processor: IOProcessor | None = None,
        adapters: dict[int, LoRARequest] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        self.kv_transfer_params = kv_transfer_params
        self.reply: Reply = reply if reply is not None else _echo
        self.tokens_per_output = tokens_per_output
        self.first_delay, self.delay, self.gate = first_delay, delay, gate
        self.reject, self.fail_after, self.die_after = reject, fail_after, die_after
        self.max_running, self.cached_tokens = max_running, cached_tokens
        self.step_times = step_times
        self.pushes = pushes
        self.speech, self.io_processor = speech, io_processor
        self.requests: list[RecordedRequest] = []
        """Every ``generate`` call that got past validation, in order."""
        self.searched: list[RecordedSearch] = []
        """Every ``beam_search`` call that found its sequences, in order."""
        self.transcribed: list[TranscriptionParams] = []
        """The parameters of every ``transcribe`` and ``stream_transcript`` call, in order."""
        self.pooled: list[RecordedPooling] = []
        """The same of ``encode``, and every pair of ``score``."""
        self.aborted: list[str] = []
        """Ids that ended before their time: by ``abort``, closing or cancellation."""
        self.finished: list[str] = []
        """Ids that ran to their end."""
        self.adapters = {} if adapters is None else adapters
        self.adapters_read: list[LoRARequest] = []
        """Those that were read, in order; removed ones that a request brings back included."""
        self.default_mm_loras: dict[str, str] = {}
        """Reported among the settings."""
        self.reading: asyncio.Event | None = None
        """If given, awaited while an adapter is read."""
        self.unusable_adapters: dict[str, str] = {}
        """Path -> why it cannot be used."""
        self.num_cache_resets = 0
        self.profiles: list[str] | None = None
        """``start`` and ``stop`` as they were asked for; None: no profiler is configured."""
        self.shut_down = False
        self._model = model or fake_served_model()
        self._running: dict[str, asyncio.Event] = {}
        self._dead: BaseException | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._outputs = 0
        self._stats = EngineStats(num_blocks=100, num_free_blocks=100, block_size=16)

    @property
    def model(self) -> ServedModel:
        return self._model

    @property
    def dead_error(self) -> BaseException | None:
        return self._dead

    @property
    def num_running(self) -> int:
        """Requests that hold resources now; 0 once all consumers are gone."""
        return len(self._running)

    def kill(self, reason: str = "the fake engine was killed") -> None:
        """Die: running and later requests raise EngineDead."""
        self._dead = EngineDead(reason)
        self._open.set()
        for stop in self._running.values():
            stop.set()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool | None = None,
    ) -> AsyncIterator[RequestOutput]:
        pulled = self._pull(prompt, params, request_id, priority, add_special_tokens, lora_request)
        return _Outputs(pulled, params.n == 1) if self.pushes else pulled

    async def _pull(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        add_special_tokens: bool | None,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        text, token_ids = self._take_in(prompt, params, request_id, add_special_tokens)
        await self._with_adapter(lora_request)
        await self._open.wait()
        self._raise_if_dead()
        self.requests.append(
            RecordedRequest(
                prompt, text, params, request_id, priority, add_special_tokens, lora_request
            )
        )
        stop = self._running[request_id] = asyncio.Event()
        ended = False
        try:
            async for output in self._play(text, token_ids, params, request_id, stop):
                ended = output.finished
                yield output
        finally:
            self._running.pop(request_id, None)
            (self.finished if ended and not stop.is_set() else self.aborted).append(request_id)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool | None = None,
    ) -> BeamSearchOutput:
        """Sequence i is the scripted completion i; each is less likely than the one before.

        It runs as one request with as many completions.
        """
        params.validate()
        if 2 * params.beam_width > self._model.max_logprobs:
            raise RequestError(
                f"beam_width = {params.beam_width}: at most {self._model.max_logprobs // 2}",
                param="beam_width",
            )
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        async for output in self._pull(
            prompt, sampling, request_id, priority, add_special_tokens, lora_request
        ):
            final = output
        if final is None or any(part.finish_reason == "abort" for part in final.outputs):
            raise GenerateError("the search was aborted")
        self.searched.append(
            RecordedSearch(prompt, params, request_id, priority, add_special_tokens, lora_request)
        )
        return BeamSearchOutput(
            [_sequence(part, final.prompt_token_ids, params) for part in final.outputs],
            final.prompt_token_ids,
            final.num_cached_tokens,
        )

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        task: str,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool | None = None,
        entry: AdmissionTicket | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        verified = self._take_in_pooling(params, request_id, task)
        text, ids = self._cut(*self._tokens(prompt, add_special_tokens), verified)
        await self._with_adapter(lora_request)
        call = RecordedPooling(
            prompt, text, verified, request_id, task, priority, add_special_tokens, entry=entry,
            lora_request=lora_request,
        )  # fmt: skip
        await self._play_pooling(request_id, [call])
        self._stats.prompt_tokens += len(ids)
        data = fake_pooled(task, ids, verified, self._model.pooling)
        return self._pooled(request_id, PoolingOutput(data), ids)

    async def answer_plugin(
        self,
        prompt: Any,
        params: PoolingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        encode: Encode | None = None,
    ) -> Any:
        """One prompt after the other, for the first task that the model has."""
        assert self.io_processor is not None, "the test gave no IO processor"
        made = await self.io_processor.pre_process_async(prompt, request_id)
        chosen = self.io_processor.validate_or_generate_params(params)
        outputs = [
            await (encode or self.encode)(
                each, chosen, f"{request_id}-{index}", task=self._model.tasks[0], priority=priority
            )
            for index, each in enumerate(made if isinstance(made, list) else [made])
        ]
        return self.io_processor.post_process(outputs, request_id)

    async def transcribe(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> Transcript:
        return await self._transcription(audio, params, request_id, generate).whole()

    def stream_transcript(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> AsyncIterator[TranscriptPiece]:
        return self._transcription(audio, params, request_id, generate).pieces()

    def _transcription(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        generate: Generate | None,
    ) -> FakeTranscription:
        if self.speech is None:
            raise UnsupportedFeature(f"{self._model.name}: does not transcribe", param="model")
        self.transcribed.append(params)
        generate = generate or self.generate
        return FakeTranscription(self.speech, self._model, generate, audio, params, request_id)

    async def align(self, prompt: Prompt, request_id: str, *, priority: int = 0) -> PackedArray:
        """One state for each token, which it comes from alone."""
        if "align" not in self._model.tasks:
            raise UnsupportedFeature(f"{self._model.name}: has no task 'align'", param="model")
        _, ids = self._tokens(prompt, False)
        if len(ids) > self._model.max_model_len:
            raise PromptTooLong(self._model.max_model_len, len(ids))
        weights = array("f", [0.0] * len(ids) ** 2)
        weights[:: len(ids) + 1] = array("f", [1.0] * len(ids))
        return PackedArray("float32", (len(ids), len(ids)), weights.tobytes())

    async def score(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        await self._with_adapter(lora_request)
        scoring = "cross" if self._model.pooling is None else self._model.pooling.scoring
        task = {"cosine": "embed", "late_interaction": "token_embed"}.get(scoring, "score")
        verified = self._take_in_pooling(params, request_id, task)
        calls, outputs = [], []
        for pair in pair_up(data_1, data_2):
            one, two = (_side(side) for side in pair)
            text, ids = self._cut(one + two, [ord(c) for c in one + two], verified)
            calls.append(
                RecordedPooling(
                    pair,
                    text,
                    verified,
                    request_id,
                    "score",
                    priority,
                    None,
                    chat_template,
                    lora_request=lora_request,
                )
            )
            score = ScoringOutput(fake_score(one, two, verified))
            outputs.append(self._pooled(request_id, score, ids))
        await self._play_pooling(request_id, calls)
        self._stats.prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
        return outputs

    def _take_in_pooling(self, params: PoolingParams, request_id: str, task: str) -> PoolingParams:
        self._admit(request_id)
        if task not in self._model.tasks:
            raise UnsupportedFeature(
                f"task = {task!r}: must be one of {list(self._model.tasks)}", param="task"
            )
        verified = params.clone()
        verified.verify(task, self._model.pooling, self._model.name)
        return verified

    def _cut(self, text: str, ids: list[int], params: PoolingParams) -> tuple[str, list[int]]:
        most, wanted = self._model.max_model_len, params.truncate_prompt_tokens
        if wanted is not None:
            keep = most if wanted == -1 else wanted
            ids = ids[:keep] if params.truncation_side == "right" else ids[-keep:]
        if not ids:
            raise RequestError("prompt: must not be empty", param="prompt")
        if len(ids) > most:
            raise PromptTooLong(most, len(ids))
        return text, ids

    async def _play_pooling(self, request_id: str, calls: Sequence[RecordedPooling]) -> None:
        """Take as long as was asked for; afterwards the results hold."""
        await self._open.wait()
        self._raise_if_dead()
        self.pooled += calls
        stop = self._running[request_id] = asyncio.Event()
        ended = False
        try:
            await self._pause(self.first_delay, stop)
            self._raise_if_dead()
            self._count_output(1)
            if stop.is_set():
                raise GenerateError("the request was aborted")
            ended = True
        finally:
            self._running.pop(request_id, None)
            (self.finished if ended else self.aborted).append(request_id)

    def _pooled(
        self, request_id: str, outputs: Any, token_ids: list[int]
    ) -> PoolingRequestOutput[Any]:
        return PoolingRequestOutput(
            request_id=request_id,
            outputs=outputs,
            prompt_token_ids=token_ids,
            num_cached_tokens=min(self.cached_tokens, len(token_ids) - 1),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].set()

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        self._raise_if_dead()
        _, ids = self._tokens(prompt, add_special_tokens)
        return TokenizedPrompt(ids, [_token_text(i) for i in ids] if strings else None)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        skipped = (BOS, EOS) if skip_special_tokens else ()
        return "".join(_token_text(i) for i in token_ids if i not in skipped)

    async def stats(self, *, drain: bool = False) -> EngineStats:
        stats = replace(self._stats, step_tokens=list(self._stats.step_tokens))
        stats.num_requests_running = len(self._running)
        if drain:
            self._stats.step_tokens.clear()
        return stats

    async def check_health(self) -> None:
        self._raise_if_dead()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        self._raise_if_dead()
        if not self._model.max_loras:
            raise UnsupportedFeature("lora_request: this engine takes no adapters")
        number, path = lora_request.lora_int_id, lora_request.lora_path
        known = self.adapters.get(number)
        if known is not None:
            if known.lora_path != path:
                raise RequestError(f"lora_int_id = {number}: is {known.lora_path!r}")
            return False
        self.adapters_read.append(lora_request)
        if self.reading is not None:
            await self.reading.wait()
        if path in self.unusable_adapters:
            raise RequestError(self.unusable_adapters[path], param="lora_path")
        self.adapters[number] = lora_request
        return True

    async def remove_lora(self, lora_int_id: int) -> bool:
        self._raise_if_dead()
        return self.adapters.pop(lora_int_id, None) is not None

    async def list_loras(self) -> Sequence[LoRARequest]:
        self._raise_if_dead()
        return [self.adapters[number] for number in sorted(self.adapters)]

    async def _with_adapter(self, lora_request: LoRARequest | None) -> None:
        if lora_request is not None:
            await self.add_lora(lora_request)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if self._running and not reset_running_requests:
            return False
        self.num_cache_resets += 1
        return True

    async def pause_generation(
        self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        self._raise_if_dead()
        self._open.clear()
        if not wait_for_inflight_requests:
            await self.abort(list(self._running))
        while self._running and not self._open.is_set():
            await asyncio.sleep(0.005)
        if clear_cache and not self._open.is_set():
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        self._open.set()

    async def is_paused(self) -> bool:
        return not self._open.is_set()

    async def scale_elastic_ep(self, new_size: int, drain_timeout: float = 300.0) -> int:
        self._raise_if_dead()
        raise UnsupportedFeature(
            "scale_elastic_ep: this is one engine", param="new_data_parallel_size"
        )

    async def start_profile(self) -> None:
        self._profile("start")

    async def stop_profile(self) -> None:
        self._profile("stop")

    def _profile(self, what: str) -> None:
        if self.profiles is None:
            raise UnsupportedFeature("no profiler is configured")
        self.profiles.append(what)

    async def collective_rpc(
        self, method: str, *, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        self._raise_if_dead()
        if method != "report" or args:
            raise RequestError(f"method = {method!r}: must be one of report", param="method")
        return [{"rank": 0}]

    @property
    def settings(self) -> Mapping[str, Any]:
        configured = {} if self.profiles is None else {"profiler": "torch"}
        lora = {"default_mm_loras": self.default_mm_loras}
        return {"profiler_config": configured, "lora": lora}

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        self.shut_down = True
        deadline = time.monotonic() + drain_timeout
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        await self.abort(list(self._running))

    def _take_in(
        self, prompt: Prompt, params: SamplingParams, request_id: str, special: bool | None
    ) -> tuple[str, list[int]]:
        self._admit(request_id)
        params.validate()
        text, ids = self._tokens(prompt, special)
        self._check(ids, params)
        return text, ids

    def _admit(self, request_id: str) -> None:
        self._raise_if_dead()
        if self.reject is not None:
            raise self.reject
        if self.max_running is not None and len(self._running) >= self.max_running:
            raise QueueFull(f"{self.max_running} requests wait already", retry_after=1.0)
        if request_id in self._running:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id")

    def _tokens(self, prompt: Prompt, special: bool | None) -> tuple[str, list[int]]:
        if isinstance(prompt, ChatPrompt):
            text = render_fake_chat(prompt)
            return text, [BOS] * bool(special) + [ord(c) for c in text]
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
        if isinstance(given, str):
            return given, [BOS] * bool(special) + [ord(c) for c in given]
        return "".join(map(_token_text, given)), list(given)

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        model = self._model
        if not ids:
            raise RequestError("prompt: must not be empty", param="prompt")
        if len(ids) + (params.max_tokens or 1) > model.max_model_len:
            raise PromptTooLong(model.max_model_len, len(ids), params.max_tokens or 1)
        if params.logprobs is not None and params.logprobs > model.max_logprobs:
            raise RequestError(
                f"logprobs = {params.logprobs}: at most {model.max_logprobs}", param="logprobs"
            )

    async def _play(
        self,
        text: str,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        stop: asyncio.Event,
    ) -> AsyncIterator[RequestOutput]:
        metrics = RequestMetrics(
            arrival_time=time.time(), queued_ts=time.monotonic(), step_times=self.step_times
        )
        self._stats.prompt_tokens += len(prompt_ids)
        limit = params.max_tokens or self._model.max_model_len - len(prompt_ids)
        parts = [
            _Completion(i, self._plan(text, i, limit, params.ignore_eos)) for i in range(params.n)
        ]
        first, sent = True, 0
        while any(part.finish_reason is None for part in parts):
            await self._pause(self.first_delay if first else self.delay, stop)
            self._raise_if_dead()
            self._advance(parts, params, limit, aborted=stop.is_set())
            metrics = self._clock(metrics, parts)
            output = self._output(parts, text, prompt_ids, params, request_id, metrics, first)
            first = False
            if output is not None:
                yield output
                sent += 1
                self._count_output(sent)

    async def _pause(self, seconds: float, stop: asyncio.Event) -> None:
        if self.gate is not None:
            waits = [asyncio.ensure_future(e.wait()) for e in (self.gate, stop)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if seconds > 0:
            try:
                await asyncio.wait_for(stop.wait(), seconds)
            except TimeoutError:
                return
        else:
            await asyncio.sleep(0)

    def _count_output(self, sent: int) -> None:
        self._outputs += 1
        if self.die_after is not None and self._outputs >= self.die_after:
            self.kill("the fake engine died as told")
        if self.fail_after is not None and sent >= self.fail_after:
            raise GenerateError("the fake engine failed this request as told")

    def _plan(self, text: str, index: int, limit: int, ignore_eos: bool) -> list[int]:
        if callable(self.reply):
            words = self.reply(text, index)
        elif isinstance(self.reply, str):
            words = self.reply
        else:
            words = self.reply[index % len(self.reply)]
        ids = [ord(c) for c in words]
        if ignore_eos and ids:
            return (ids * (limit // len(ids) + 1))[:limit]
        return [*ids, EOS]

    def _advance(
        self, parts: list[_Completion], params: SamplingParams, limit: int, aborted: bool
    ) -> None:
        before = sum(len(part.token_ids) for part in parts)
        cut = self.tokens_per_output
        size = cut() if callable(cut) else cut
        for part in parts:
            if part.finish_reason is None and aborted:
                part.finish_reason = "abort"
            for _ in range(size):
                if part.finish_reason is None:
                    _add_token(part, params, limit)
        new = sum(len(part.token_ids) for part in parts) - before
        self._stats.generation_tokens += new
        self._stats.num_steps += 1
        self._stats.iteration_tokens += new
        self._stats.step_tokens.append(new)

    def _clock(self, metrics: RequestMetrics, parts: list[_Completion]) -> RequestMetrics:
        now = time.monotonic()
        return replace(
            metrics,
            scheduled_ts=metrics.scheduled_ts or now,
            first_token_ts=metrics.first_token_ts or now,
            last_token_ts=now,
            num_generation_tokens=sum(len(part.token_ids) for part in parts),
        )

    def _output(
        self,
        parts: list[_Completion],
        text: str,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        metrics: RequestMetrics,
        first: bool,
    ) -> RequestOutput | None:
        kind = params.output_kind
        finished = all(part.finish_reason is not None for part in parts)
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        delta = kind is RequestOutputKind.DELTA
        shown = [p for p in parts if not (delta and p.reported)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None and (first or not delta):
            prompt_logprobs = _prompt_logprobs(prompt_ids, params)
        return RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=prompt_ids,
            outputs=[_completion_output(part, params, delta) for part in shown],
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=metrics,
            num_cached_tokens=min(self.cached_tokens, len(prompt_ids) - 1),
            kv_transfer_params=self.kv_transfer_params if finished else None,
        )

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDead(str(self._dead)) from self._dead


class _Outputs(AsyncIterator[RequestOutput]):
    """An :class:`~headrace_core.engine.OutputStream` over a generator."""

    def __init__(self, pulled: AsyncGenerator[RequestOutput, None], is_one: bool) -> None:
        self._pulled = pulled
        self._is_one = is_one

    async def __anext__(self) -> RequestOutput:
        return await self._pulled.__anext__()

    async def decided(self) -> None:
        """Nothing is prepared elsewhere: the first item is there at once, or its error."""

    async def aclose(self) -> None:
        await self._pulled.aclose()

    async def push(
        self,
        take: Callable[[RequestOutput], bool],
        take_text: Callable[[str, int], bool] | None = None,
    ) -> None:
        async for output in self._pulled:
            if take_text is not None and self._is_one and _is_text_only(output):
                (part,) = output.outputs
                more = take_text(part.text, len(part.token_ids))
            else:
                more = take(output)
            if not more:
                return


def _is_text_only(output: RequestOutput) -> bool:
    parts = output.outputs
    return len(parts) == 1 and parts[0].finish_reason is None and parts[0].logprobs is None


def _echo(prompt: str, index: int) -> str:
    return f"You said: {prompt}"


def _side(given: ScoreInput) -> str:
    """The text of one side of a pair."""
    if isinstance(given, str):
        return given
    side: Mapping[str, Any] = given
    if "content" in side:
        return _content(side)
    ids = side.get("prompt_token_ids")
    return str(side["prompt"]) if ids is None else "".join(map(_token_text, ids))


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in content)


def _token_text(token_id: int) -> str:
    return chr(token_id) if 0 <= token_id < BOS else {BOS: "<s>", EOS: "</s>"}.get(token_id, "")


def _add_token(part: _Completion, params: SamplingParams, limit: int) -> None:
    token = part.planned[len(part.token_ids)]
    part.token_ids.append(token)
    enough = len(part.token_ids) >= params.min_tokens
    if token == EOS and not params.ignore_eos and enough:
        part.finish_reason = "stop"
        return
    part.text += _token_text(token) if token < BOS and params.detokenize else ""
    if enough and token in (params.stop_token_ids or ()):
        part.finish_reason, part.stop_reason = "stop", token
    elif enough and (stop := next((s for s in params.stop_strings if s in part.text), None)):
        cut = part.text.index(stop)
        part.text = part.text[: cut + len(stop) * params.include_stop_str_in_output]
        part.finish_reason, part.stop_reason = "stop", stop
    elif len(part.token_ids) >= limit:
        part.finish_reason = "length"
    elif len(part.token_ids) == len(part.planned):
        part.finish_reason = "stop"


def _sendable(part: _Completion, params: SamplingParams) -> int:
    """Characters that no stop string can take back."""
    if part.finish_reason is not None:
        return len(part.text)
    held = 0
    for stop in params.stop_strings:
        for size in range(1, len(stop)):
            if part.text.endswith(stop[:size]):
                held = max(held, size)
    return max(part.sent_chars, len(part.text) - held)


def _completion_output(part: _Completion, params: SamplingParams, delta: bool) -> CompletionOutput:
    start, chars = (part.sent_tokens, part.sent_chars) if delta else (0, 0)
    end = _sendable(part, params)
    ids = part.token_ids[start:]
    part.sent_tokens, part.sent_chars = len(part.token_ids), end
    part.reported = part.finish_reason is not None
    logprobs = None
    if params.logprobs is not None:
        logprobs = _container(params.flat_logprobs)
        for token in ids:
            logprobs.append(_position(token, params.logprobs))
    return CompletionOutput(
        index=part.index,
        text=part.text[chars:end],
        token_ids=ids,
        cumulative_logprob=-0.5 * len(part.token_ids) if logprobs is not None else None,
        logprobs=logprobs,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
    )


def _sequence(
    part: CompletionOutput, prompt_ids: list[int], params: BeamSearchParams
) -> BeamSequence:
    """A completion as a beam, whose score is -1 - index."""
    ended = part.finish_reason == "stop"
    end = _token_text(EOS) if ended and params.include_stop_str_in_output else ""
    score, length = -1.0 - part.index, len(part.token_ids)
    cum_logprob = score * length**params.length_penalty
    return BeamSequence(
        tokens=[*prompt_ids, *part.token_ids],
        logprobs=[{token: Logprob(cum_logprob / length)} for token in part.token_ids],
        cum_logprob=cum_logprob,
        score=score,
        num_prompt_tokens=len(prompt_ids),
        text="".join(map(_token_text, prompt_ids)) + part.text + end,
        output_text=part.text + end,
        finish_reason=part.finish_reason,
        stop_reason=EOS if ended else None,
    )


def _container(flat: bool) -> Logprobs:
    return FlatLogprobs() if flat else []


def _position(token: int, count: int) -> PositionLogprobs:
    """The chosen token has -0.5 and rank 1; its neighbours follow, each 1.0 less likely."""
    near = [(token + i) % BOS for i in range(max(1, count))]
    near[0] = token
    return {
        t: Logprob(-0.5 - i, i + 1, _token_text(t), _token_bytes(t)) for i, t in enumerate(near)
    }


def _token_bytes(token_id: int) -> bytes:
    """Texts have no special tokens."""
    return chr(token_id).encode("utf-8", "replace") if 0 <= token_id < BOS else b""


def _prompt_logprobs(prompt_ids: list[int], params: SamplingParams) -> Logprobs:
    logprobs = _container(params.flat_logprobs)
    logprobs.append(None)
    for token in prompt_ids[1:]:
        logprobs.append(_position(token, params.prompt_logprobs or 0))
    return logprobs
