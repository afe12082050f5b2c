"""The engine as a server or the offline API sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from headrace_core.arrays import PackedArray
from headrace_core.lora import LoRARequest
from headrace_core.output import (
    BeamSearchOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import AudioClip, SpeechModel
from headrace_core.speech.transcription import Transcript, TranscriptionParams, TranscriptPiece


class AdmissionTicket:
    """One admission to an engine's queue for all prompts of a call.

    The queue's limits are for calls: the first prompt that comes with a ticket is admitted or refused as
    a request, and no other is begun until it has been admitted; then none is refused. Made and used on
    one event loop.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held by the prompt that is being admitted."""
        self.admitted = False
        """True once a prompt of the call was admitted."""
        self._places: asyncio.Semaphore | None = None

    def place(self, most: int) -> asyncio.Semaphore:
        """The semaphore that a prompt holds from before its admission until it has ended.

        Args:
            most: prompts of the call that may be under way together; the first one's number counts.
        """
        if self._places is None:
            self._places = asyncio.Semaphore(most)
        return self._places


Generate = Callable[[Prompt, SamplingParams, str], AsyncIterator[RequestOutput]]
"""Runs a request: (prompt, parameters, request id) -> outputs."""
Encode = Callable[..., Awaitable[PoolingRequestOutput[PoolingOutput]]]
"""Runs a pooling request; arguments of :meth:`EngineClient.encode`."""


@dataclass(slots=True)
class EngineStats:
    """A snapshot; counters never fall while an engine lives."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_requests_suspended: int = 0
    """Requests that wait for their reader; they neither run nor wait."""
    kv_cache_usage: float = 0.0
    """0..1, share of blocks that requests hold; of the fullest pool, if there are several."""
    num_blocks: int = 0
    """Blocks of all pools together, as the next; states of recurrent layers count as blocks."""
    num_free_blocks: int = 0
    block_size: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up."""
    prefix_cache_hits: int = 0
    """Tokens found."""
    num_steps: int = 0
    iteration_tokens: int = 0
    """Tokens over all steps."""
    step_tokens: list[int] = field(default_factory=list)
    """Tokens of each step since the last snapshot taken with ``drain=True``."""
    heartbeat_age: float = 0.0
    """Seconds since the loop last came round."""
    num_drafts: int = 0
    """Runs of guesses that were checked, then all guesses of them, and the right ones by their place."""
    num_draft_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    sleep_level: int = 0
    """1 or 2 while the engine takes no requests for having slept at that level."""
    weights_version: str = ""
    """Version of the weights that compute now; "": not known."""
    kv_transfer: dict[str, int] = field(default_factory=dict)
    """Counters of a KV connector by name; {}: there is none."""
    running_loras: dict[str, int] = field(default_factory=dict)
    waiting_loras: dict[str, int] = field(default_factory=dict)
    """Requests that run, and that wait, with each adapter, by its name; those without one are left out."""
    scaling_to: int = 0
    """Engines that there will be, while their number changes; else 0."""
    by_engine: list[EngineStats] = field(default_factory=list)
    """Where these are sums over several engines: each one's own, in order."""
    ended: str = ""
    """In :attr:`by_engine`: why that engine does not run; its numbers are 0."""


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt as the engine would run it."""

    token_ids: list[int]
    token_strings: list[str] | None = None


@runtime_checkable
class OutputStream(Protocol):
    """Outputs of :meth:`EngineClient.generate` that need not be pulled one by one."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def decided(self) -> None:
        """Return once the request is under way or refused; a task must be iterating meanwhile.

        After this, iteration raises no error that the prompt or its parameters deserve.
        """

    async def push(
        self,
        take: Callable[[RequestOutput], bool],
        take_text: Callable[[str, int], bool] | None = None,
    ) -> None:
        """Call ``take`` with every further output as soon as it is there, on the event loop and
        without a task switch; return once it says False, or after the last output.

        The output with which it said False counts as taken. Pushing and iterating may alternate,
        but not at once, and the first output must be taken by iterating. Outputs are merged as in
        iteration while neither is under way.

        Args:
            take: gets the outputs.
            take_text: gets (new text, number of new tokens) in place of an output that says no more
                than that: one of a request with one completion that goes on, streams what is
                new and has no log-probabilities. Such an output is then never made.

        Raises: what iteration would raise, and what ``take`` and ``take_text`` raise.
        """


class EngineClient(Protocol):
    """An engine, in this process or in another.

    Methods may be called from one asyncio event loop. Exceptions are those of
    :mod:`headrace_core.errors`.
    """

    @property
    def model(self) -> ServedModel: ...

    @property
    def dead_error(self) -> BaseException | None:
        """Why the engine stopped, or None while it runs."""

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
        """Run one request. Closing the iterator, or cancelling its consumer, aborts it.

        With a ``lora_request`` (here and in the methods below) it is computed with that adapter, which is
        read first if :meth:`add_lora` has not been called; RequestError if the engine takes none.

        The iterator may be an :class:`OutputStream`, which costs less for each output.

        Outputs follow ``params.output_kind``; if the consumer is slower than the engine, waiting
        outputs are merged, and a request whose outputs are what is new waits until they are taken, so
        that a slow reader costs bounded memory.

        Raises (on first iteration): RequestError, QueueFull, EngineDead; later: GenerateError,
        EngineDead.
        """

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
        """Find the likeliest continuations of one prompt. Cancelling the call aborts the search.

        Args:
            prompt: text, tokens or a chat.
            request_id: the ids of the requests that the search needs begin with it.
            priority: of these requests.
            add_special_tokens: as for :meth:`generate`.

        Raises:
            UnsupportedFeature: the prompt has embeddings or media, or the engine reports no
                log-probabilities.
            RequestError: ``beam_width`` needs more than the model's ``max_logprobs``; else, and for
                QueueFull, GenerateError, EngineDead: as :meth:`generate`.
        """

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
        """Run one pooling request. Cancelling the call aborts it.

        Args:
            params: not changed.
            entry: shared by all prompts of one call; None: the prompt is a call of its own.
            task: of :data:`headrace_core.pooling.POOLING_TASKS`, ``plugin`` excepted.

        Returns:
            Its ``outputs.data`` is a :class:`~headrace_core.arrays.PackedArray` of float32.

        Raises:
            UnsupportedFeature: the model does not have the task; names it and what would help.
            RequestError, QueueFull, GenerateError, EngineDead: as :meth:`generate`.
        """

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
        """Score of each pair, in order; the texts are given 1:1, 1:N or N:N.

        By the model's own way (:attr:`~headrace_core.pooling.PoolingInfo.scoring`): both texts in one
        prompt, the cosine of two embeddings, or late interaction. An equal text is embedded once.

        Args:
            chat_template: replaces the model's template for pairs; only for models that have one.

        Raises: as :meth:`encode`; a wrong pair is a RequestError.
        """

    @property
    def speech(self) -> SpeechModel | None:
        """Speech to text, if the model has the task ``transcription``."""

    async def transcribe(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> Transcript:
        """Write down a recording, whose clips run side by side. Cancelling the call aborts them.

        Args:
            audio: of :meth:`~headrace_core.speech.model.SpeechModel.decode`, at the model's rate.
            request_id: the ids of the requests that it needs begin with it.
            generate: runs these requests, in place of :meth:`generate`.

        Raises:
            UnsupportedFeature: the model does not transcribe.
            RequestError, QueueFull, GenerateError, EngineDead: as :meth:`generate`.
        """

    def stream_transcript(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> AsyncIterator[TranscriptPiece]:
        """Write down a recording piece by piece, at the first temperature; arguments and errors as
        :meth:`transcribe`. Closing the iterator aborts the requests."""

    async def align(self, prompt: Prompt, request_id: str, *, priority: int = 0) -> PackedArray:
        """Part of the media that each token of a sequence comes from: for the times of words.

        Args:
            prompt: the whole sequence, output included, with its media, for a model with the task
                ``align``. Cancelling the call aborts it.

        Returns:
            [tokens, encoder states] float32; see
            :meth:`headrace_core.model.SupportsAlignment.align`.

        Raises:
            UnsupportedFeature: the model does not have the task.
            RequestError, QueueFull, GenerateError, EngineDead: as :meth:`generate`.
        """

    @property
    def io_processor(self) -> IOProcessor | None:
        """Answers requests of the task ``plugin``; None: there is none."""

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
        """One request of the task ``plugin``, once the IO processor has parsed it: what that makes of it.

        Args:
            params: the caller's; None: the IO processor's own.
            encode: runs its prompts, in place of :meth:`encode`.

        Raises:
            UnsupportedFeature: there is no IO processor.
            HeadraceError: as :meth:`encode`; else whatever the IO processor raises.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with finish reason ``abort``; unknown ids are ignored."""

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        """Tokens of any prompt, chats included."""

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """Text of token ids, special tokens included unless they are skipped."""

    async def stats(self, *, drain: bool = False) -> EngineStats:
        """Counters and gauges of the core."""

    async def check_health(self) -> None:
        """Return if the engine makes progress.

        Raises:
            EngineDead: it stopped, or its heartbeat is older than the limit.
        """

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter and check it. False: its id was known, with this path.

        Raises:
            UnsupportedFeature: the engine takes no adapters.
            RequestError: the id has another path, or the adapter cannot be used; says why.
        """

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Take no further requests with an adapter; those under way go on. False: the id is unknown."""

    async def list_loras(self) -> Sequence[LoRARequest]:
        """Adapters that :meth:`add_lora` or a request made known and nobody removed, by id."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False while requests hold some.

        Args:
            reset_running_requests: preempt them, so that the reset succeeds; they go on later.
        """

    async def pause_generation(
        self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Start no further request until :meth:`resume_generation`: new ones are checked, and then
        wait. Returns once nothing runs any more, or when generation is resumed meanwhile.

        Args:
            wait_for_inflight_requests: let what runs or is queued finish; False aborts it (finish
                reason ``abort``).
            clear_cache: then forget all cached blocks.
        """

    async def resume_generation(self) -> None:
        """Start what waited. Not paused: nothing happens."""

    async def is_paused(self) -> bool:
        """True if :meth:`pause_generation` was called last."""

    async def start_profile(self) -> None:
        """Record the coming steps, as the engine's profiler settings say.

        Raises:
            UnsupportedFeature: the engine was started without a profiler.
            RequestError: it records already.
        """

    async def stop_profile(self) -> None:
        """End the recording and write it. Nothing to write: nothing happens.

        Raises:
            UnsupportedFeature: the engine was started without a profiler.
        """

    async def collective_rpc(
        self, method: str, *, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Call a method of every worker, by name and between two steps: results by rank.

        Only methods that an engine lists may be called: ``report`` (facts about the worker), and
        what an engine adds.

        Args:
            timeout: seconds; None: the engine's own limit.

        Raises:
            RequestError: the method may not be called, or not with these arguments.
            TimeoutError: no answer in time; the call still runs.
        """

    async def scale_elastic_ep(self, new_size: int, drain_timeout: float = 300.0) -> int:
        """Have so many data-parallel engines, while requests run. Cancelling the call ends nothing.

        Args:
            drain_timeout: seconds that requests have to end in engines that leave.

        Returns:
            Requests that had not ended by then, and were ended.

        Raises:
            RequestError: the number, or the engine, cannot be scaled so; says why.
            GenerateError: not now (public), or a new engine did not start: the old number stays.
        """

    @property
    def settings(self) -> Mapping[str, Any]:
        """The engine's configuration as plain data (what JSON can hold), secrets left out."""

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Let running requests finish for so many seconds, abort the rest, free everything."""
