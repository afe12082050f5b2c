"""The engine as a server sees it: :class:`Engine`, an :class:`~headrace_core.engine.EngineClient`.

It runs the :class:`~headrace_engine.front.EngineFront` on an event loop; the synchronous engine is
:class:`headrace_engine.offline.OfflineEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeGuard, TypeVar

import msgspec

from headrace_core.arrays import PackedArray
from headrace_core.context import ENGINE, OWNER
from headrace_core.engine import AdmissionTicket, Encode, EngineStats, Generate, TokenizedPrompt
from headrace_core.errors import EngineDead, GenerateError
from headrace_core.lora import LoRARequest
from headrace_core.output import BeamSearchOutput, RequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import AudioClip, SpeechModel
from headrace_core.speech.transcription import Transcript, TranscriptionParams, TranscriptPiece
from headrace_core.text import Tokenizer
from headrace_engine.clients.base import CONTROL_TIMEOUT, PROFILE_TIMEOUT, CoreClient, dead_again
from headrace_engine.config import EngineConfig
from headrace_engine.front import ControlCall, EngineFront
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.pooling import PoolingPrompt
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.input_processing.threads import InputThreads
from headrace_engine.messages import CoreOutputs
from headrace_engine.output_processing.output import StreamState
from headrace_engine.output_processing.output_processor import FollowedRequest, ProcessedOutputs
from headrace_engine.output_processing.pooled import PooledOutput
from headrace_engine.output_processing.stream import EngineOutputs, OutputChannel
from headrace_engine.pooling import plugin_task
from headrace_engine.pooling.bounded import run_bounded
from headrace_engine.pooling.jobs import PoolingJob
from headrace_engine.pooling.scores import AT_ONCE, Scored
from headrace_engine.queue_limits import PauseGate, QueueLimits, arriving
from headrace_engine.request_ids import as_request_ids
from headrace_engine.structured.admission import Admitted
from headrace_engine.transcription.calls import StreamedClipRequests
from headrace_engine.transcription.recordings import RecordingTask

logger = logging.getLogger(__name__)

SLOW_STEP = 4.0
"""A step may take this many times what the largest one took at start, before the engine counts as
stuck: contexts are longer and machines busier than then."""
UNREAD_BYTES = 8 * 1024
"""About what an output may hold that its reader has not taken, before its request is suspended. With what
waits in a socket it stays below the 64 KiB that a slow reader may cost."""
PAUSE_POLL = 0.02
"""Seconds between two checks that the last request has ended."""

T = TypeVar("T")


class Engine:
    """An :class:`~headrace_core.engine.EngineClient` over any :class:`CoreClient`.

    The constructor starts the core and waits until it is ready. All other methods belong to one
    asyncio event loop, the one that calls first.

    Args:
        client: not yet started.
        input_processor: knows tokenizer and model.
        config: resolved; the scheduler's part is read.
        heartbeat_limit: seconds without a round of the loop after which the engine counts as stuck;
            None: the configuration's, or :data:`SLOW_STEP` times what the largest step takes if
            that is more.
        speech: speech to text, if the model does that.
        io_processor: answers requests of the task ``plugin``.

    Raises:
        HeadraceError: whatever kept the core from starting.
    """

    def __init__(
        self,
        client: CoreClient,
        input_processor: InputProcessor,
        config: EngineConfig | None = None,
        *,
        heartbeat_limit: float | None = None,
        speech: SpeechModel | None = None,
        io_processor: IOProcessor | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.speech = speech
        """See :attr:`headrace_core.engine.EngineClient.speech`."""
        self.io_processor = io_processor
        """See :attr:`headrace_core.engine.EngineClient.io_processor`."""
        self._client = client
        self._waiting = _LoopWaiting(
            self, InputThreads(input_processor, config.structured_outputs.compile_processes)
        )
        self._front = EngineFront(
            client, input_processor, self._waiting, stream_interval=config.scheduler.stream_interval
        )
        self._processor = self._front.processor
        self._limits = QueueLimits(config.scheduler, self._processor)
        self._gate = PauseGate()
        self._streams: dict[str, OutputChannel] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: BaseException | None = None
        self._closing = False
        self._config = config
        self._front.start(self)
        self._heartbeat_limit = heartbeat_limit or max(
            config.observability.heartbeat_limit, SLOW_STEP * client.step_seconds
        )

    @property
    def model(self) -> ServedModel:
        return self._front.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None if none was loaded."""
        return self._front.tokenizer

    @property
    def client(self) -> CoreClient:
        """The way to the core, with its start timeline and memory plan."""
        return self._client

    @property
    def dead_error(self) -> BaseException | None:
        return self._dead or self._client.failure

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool | None = None,
    ) -> EngineOutputs:
        """See :meth:`headrace_core.engine.EngineClient.generate`."""

        prepare = partial(
            self._front.prepare,
            prompt,
            params,
            request_id,
            priority=priority,
            add_special_tokens=add_special_tokens,
            lora_request=lora_request,
            owner=OWNER.get(),  # of the caller's task; another may iterate
            engine=ENGINE.get(),
        )
        channel = OutputChannel()
        return EngineOutputs(self._pull(channel, params.n, prepare), channel, self._raise_failure)

    async def _pull(
        self, channel: OutputChannel, n: int, prepare: Callable[[], Awaitable[PreparedRequest]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Take the request in and yield its outputs, as far as they are not pushed."""
        try:
            async with self._waiting.arriving(n) as admit:
                request = await prepare()
                await admit(request.num_tokens)
                state = self._open_stream(request, channel)
        finally:
            channel.decided.set()
        assert isinstance(state, StreamState)
        try:
            while not state.exhausted:
                output = state.take()
                if output is not None and state.error is None:
                    yield output
                    continue
                self._raise_failure(state)
                await channel.wait()
        finally:
            self._close_stream(state, channel)

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
        """See :meth:`headrace_core.engine.EngineClient.beam_search`."""
        return await self._front.beam_search(
            prompt,
            params,
            request_id,
            priority=priority,
            add_special_tokens=add_special_tokens,
            lora_request=lora_request,
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
    ) -> PooledOutput:
        """See :meth:`headrace_core.engine.EngineClient.encode`."""
        job = PoolingJob(
            prompt,
            params,
            task,
            request_id,
            priority,
            add_special_tokens,
            lora_request=lora_request,
        )
        entry = entry or AdmissionTicket()
        async with entry.place(self._waiting.share()):
            return await self._front.encode(job, entry)

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
        """See :meth:`headrace_core.engine.EngineClient.answer_plugin`."""
        return await plugin_task.answer(
            self.io_processor,
            encode or self.encode,
            self.model,
            prompt,
            params,
            request_id,
            priority=priority,
            add_special_tokens=add_special_tokens,
        )

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
    ) -> list[Scored]:
        """See :meth:`headrace_core.engine.EngineClient.score`."""
        self._check_open()
        plan = partial(
            self._front.input_processor.scores.plan,
            data_1, data_2, params, request_id, priority=priority, chat_template=chat_template,
            lora_request=lora_request,
        )  # fmt: skip
        return await self._front.score(plan, data_1, data_2)

    async def transcribe(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> Transcript:
        """See :meth:`headrace_core.engine.EngineClient.transcribe`."""
        return await self._recording(audio, params, request_id, generate).whole()

    def stream_transcript(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> AsyncGenerator[TranscriptPiece, None]:
        """See :meth:`headrace_core.engine.EngineClient.stream_transcript`."""
        return self._recording(audio, params, request_id, generate).pieces()

    def _recording(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        generate: Generate | None,
    ) -> RecordingTask:
        front = self._front
        requests = StreamedClipRequests(front, generate or self.generate, request_id, front.compute)
        return RecordingTask(self, requests, audio, params, request_id)

    async def align(self, prompt: Prompt, request_id: str, *, priority: int = 0) -> PackedArray:
        """See :meth:`headrace_core.engine.EngineClient.align`."""
        return await self._front.align(prompt, request_id, priority=priority)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """See :meth:`headrace_core.engine.EngineClient.abort`; one id is taken as well.

        Raises:
            RequestError: an id is not text; nothing is aborted.
        """
        request_ids = as_request_ids(request_ids)
        if self.model.runner == "pooling":
            calls = set(request_ids)
            states = self._processor.states
            request_ids = [s.request.request_id for s in states
                           if s.request.call in calls or s.request.request_id in calls]  # fmt: skip
        self._publish(self._processor.end(request_ids, "abort"))

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        """See :meth:`headrace_core.engine.EngineClient.tokenize`."""
        return await self._front.tokenize(
            prompt, add_special_tokens=add_special_tokens, strings=strings
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """See :meth:`headrace_core.engine.EngineClient.detokenize`."""
        return await self._front.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def stats(self, *, drain: bool = False) -> EngineStats:
        """See :meth:`headrace_core.engine.EngineClient.stats`."""
        stats = await self._front.stats(drain)
        stats.heartbeat_age = self._client.heartbeat_age
        for told in (stats, *stats.by_engine[:1]):  # sums stay right
            told.num_requests_waiting += self._gate.num_held
        return stats

    async def check_health(self) -> None:
        """See :meth:`headrace_core.engine.EngineClient.check_health`."""
        if self.dead_error is not None:
            raise dead_again(self.dead_error)
        trouble = self._client.trouble(self._heartbeat_limit)
        if trouble is not None:
            raise EngineDead(trouble)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See :meth:`headrace_core.engine.EngineClient.add_lora`."""
        self._check_open()
        return await self._front.add_lora(lora_request)

    async def remove_lora(self, lora_int_id: int) -> bool:
        """See :meth:`headrace_core.engine.EngineClient.remove_lora`."""
        self._check_open()
        return await self._front.remove_lora(lora_int_id)

    async def list_loras(self) -> Sequence[LoRARequest]:
        """See :meth:`headrace_core.engine.EngineClient.list_loras`."""
        self._check_open()
        return await self._front.list_loras()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See :meth:`headrace_core.engine.EngineClient.reset_prefix_cache`."""
        return await self._front.reset_prefix_cache(reset_running_requests)

    async def pause_generation(
        self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """See :meth:`headrace_core.engine.EngineClient.pause_generation`."""
        self._check_open()
        self._gate.close()
        self._resume_all()
        if not wait_for_inflight_requests:
            await self.abort([state.request.request_id for state in self._processor.states])
        # Not until the last stream is closed: a consumer may take as long as it likes to read.
        while self._processor.has_unfinished and self._gate.paused and self.dead_error is None:
            await asyncio.sleep(PAUSE_POLL)
        if self.dead_error is not None:
            raise dead_again(self.dead_error)
        if clear_cache and self._gate.paused and not await self.reset_prefix_cache():
            logger.warning("paused, but the prefix cache was not emptied: blocks are in use")

    async def resume_generation(self) -> None:
        """See :meth:`headrace_core.engine.EngineClient.resume_generation`."""
        self._gate.open()

    async def is_paused(self) -> bool:
        """See :meth:`headrace_core.engine.EngineClient.is_paused`."""
        return self._gate.paused

    async def start_profile(self) -> None:
        """See :meth:`headrace_core.engine.EngineClient.start_profile`."""
        await self.collective_rpc("start_profile")

    async def stop_profile(self) -> None:
        """See :meth:`headrace_core.engine.EngineClient.stop_profile`."""
        await self.collective_rpc("stop_profile", timeout=PROFILE_TIMEOUT)

    async def collective_rpc(
        self, method: str, *, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """See :meth:`headrace_core.engine.EngineClient.collective_rpc`."""
        return await self._call_workers(method, args, timeout)

    async def run_on_workers(
        self,
        function: Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        timeout: float | None = None,
    ) -> list[Any]:
        """Run a function with each worker of this process, and then ``args``: results by rank.

        Raises:
            EngineError: the function would have ended a worker, or asked this engine for something.
            UnsupportedFeature: the workers are in another process.
            TimeoutError: there was no answer in time; names the function and the seconds.
        """
        return await self._call_workers(function, args, timeout)

    async def _call_workers(
        self, method: str | Callable[..., Any], args: Sequence[Any], timeout: float | None
    ) -> list[Any]:
        self._check_open()
        seconds = CONTROL_TIMEOUT if timeout is None else timeout
        return await self._front.call_workers(method, args, seconds)

    async def scale_elastic_ep(self, new_size: int, drain_timeout: float = 300.0) -> int:
        """See :meth:`headrace_core.engine.EngineClient.scale_elastic_ep`."""
        self._check_open()
        return await self._front.scale(new_size, drain_timeout)

    @property
    def settings(self) -> Mapping[str, Any]:
        """See :attr:`headrace_core.engine.EngineClient.settings`."""
        settings = plain_settings(self._config)
        if self._client.num_engines is not None:
            of_all = self._config.parallel.data_parallel_start_rank is None
            name = "data_parallel_size" if of_all else "data_parallel_size_local"
            settings["parallel"][name] = self._client.num_engines
        return settings

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """See :meth:`headrace_core.engine.EngineClient.shutdown`. Idempotent."""
        self._closing = True
        self._gate.give_up()
        deadline = time.monotonic() + drain_timeout
        while self._streams and self.dead_error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.abort([state.request.request_id for state in self._processor.states])
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._client.shutdown)
        finally:
            self._waiting.threads.close()
            self._front.input_processor.close()
            if self.speech is not None:
                self.speech.close()

    # OutputSink: called from a thread of the client's.

    def on_outputs(self, outputs: CoreOutputs) -> None:
        """Hand a step's outputs to the event loop: one wake-up per step."""
        self._to_loop(self._take_outputs, outputs)

    def on_death(self, error: BaseException) -> None:
        """End all streams with the error."""
        self._dead = error
        self._to_loop(self._wake_all)

    def _to_loop(self, function: Callable[..., None], *args: object) -> None:
        # Before the first request there is no loop and nobody to tell; a loop that is closed
        # already has no consumers either.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *args)

    # The event loop's side.

    def _take_outputs(self, outputs: CoreOutputs) -> None:
        self._publish(self._processor.process(outputs))

    def _publish(self, processed: ProcessedOutputs) -> None:
        if processed.abort_core_ids:
            self._client.abort(processed.abort_core_ids)
        behind = []
        for state in processed.changed:
            channel = self._streams.get(state.request.request_id)
            if channel is not None:
                channel.tell()
                if self._is_behind(state):
                    behind.append((state, state.num_takes))
        if behind and self._loop is not None:
            # Readers that were woken just now come first.
            self._loop.call_soon(self._suspend, behind)

    def _is_behind(self, state: FollowedRequest) -> TypeGuard[StreamState]:
        """True if much of a request that goes on was not taken, and it is not suspended yet."""
        return (
            isinstance(state, StreamState)
            and state.on_taken is None
            and state.ready  # else nobody could take anything (--stream-interval)
            and state.num_untaken_bytes > UNREAD_BYTES
            and not state.finished
            and not self._gate.paused  # whoever pauses generation waits for what runs
        )

    def _suspend(self, found: Sequence[tuple[StreamState, int]]) -> None:
        """Stop computing what nobody reads, until it is read. Whoever has taken something since it was
        found behind keeps up: what it has not taken came in one burst since, while the loop was busy."""
        if self._closing or self.dead_error is not None:
            return
        for state, num_takes in found:
            if state.num_takes == num_takes and self._is_behind(state):
                core_ids = state.unfinished_core_ids
                state.on_taken = partial(self._resume, core_ids)
                self._client.suspend(core_ids)

    def _resume(self, core_ids: Sequence[str]) -> None:
        if self.dead_error is None:
            self._client.resume(core_ids)

    def _resume_all(self) -> None:
        """Go on whether anybody reads or not."""
        for state in self._processor.states:
            if isinstance(state, StreamState) and state.on_taken is not None:
                on_taken, state.on_taken = state.on_taken, None
                on_taken()

    def _wake_all(self) -> None:
        self._gate.give_up()
        for channel in self._streams.values():
            channel.wake()

    def _check_open(self) -> None:
        if self.dead_error is not None:
            raise dead_again(self.dead_error)
        if self._closing:
            raise EngineDead("the engine is shutting down")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this Engine belongs to another asyncio event loop")

    def _open_stream(self, request: PreparedRequest, channel: OutputChannel) -> FollowedRequest:
        self._check_open()  # preparing may have taken a while
        state = channel.state = self._front.begin(request)
        self._streams[request.request_id] = channel
        return state

    def _close_stream(self, state: FollowedRequest, channel: OutputChannel) -> None:
        """Whatever still runs of the request is aborted: its consumer has gone."""
        request_id = state.request.request_id
        if self._streams.get(request_id) is channel:
            del self._streams[request_id]
        core_ids = self._processor.remove(state)
        if core_ids and self.dead_error is None:
            with contextlib.suppress(EngineDead):
                self._client.abort(core_ids)

    def _raise_failure(self, state: FollowedRequest) -> None:
        if state.error is not None:
            raise state.error
        if self.dead_error is not None:
            raise dead_again(self.dead_error)

    async def _last_output(self, state: FollowedRequest, channel: OutputChannel) -> Any:
        """The last output of a request that is under way; a caller that is cancelled here aborts it."""
        output = None
        try:
            while not state.exhausted:
                output = state.take() or output
                self._raise_failure(state)
                if not state.exhausted:
                    await channel.wait()
            if output is None:
                raise GenerateError(f"request {state.request.request_id!r} was aborted")
            return output
        finally:
            self._close_stream(state, channel)


class _LoopWaiting:
    """The :class:`~headrace_engine.front.Waiting` of an asynchronous engine.

    Args:
        engine: owns the streams, the queue's limits and the gate.
        threads: do what would keep the event loop waiting.
    """

    def __init__(self, engine: Engine, threads: InputThreads) -> None:
        self._engine = weakref.proxy(engine)
        self.threads = threads

    def arriving(
        self, num_requests: int = 1, ticket: AdmissionTicket | None = None
    ) -> AbstractAsyncContextManager[Callable[[int], Awaitable[None]]]:
        engine = self._engine
        engine._check_open()
        return arriving(engine._limits, engine._gate, num_requests, ticket)

    def share(self, wanted: int | None = None) -> int:
        return int(self._engine._limits.share(AT_ONCE if wanted is None else wanted))

    async def read(self, prompt: PoolingPrompt | Sequence[int], work: Callable[[], T]) -> T:
        return await self.threads.run(prompt, work)

    async def compute(self, work: Callable[[], T], size: int | None = None) -> T:
        if size is None:
            return await self.threads.run_heavy(work)
        return await self.threads.run_sized(size, work)

    async def admit(self, params: SamplingParams) -> Admitted | None:
        return await self.threads.admit(params)

    async def answer(self, call: ControlCall[T]) -> T:
        return await call

    def begin(self, request: PreparedRequest) -> Awaitable[Any]:
        engine: Engine = self._engine
        channel = OutputChannel()
        return engine._last_output(engine._open_stream(request, channel), channel)

    async def together(
        self, work: Iterator[Coroutine[Any, Any, T]], at_once: int, take: Callable[[int, T], object]
    ) -> None:
        await run_bounded(work, at_once, take)


def plain_settings(config: EngineConfig) -> dict[str, Any]:
    """A configuration as plain data; the hub's token is left out."""
    settings: dict[str, Any] = msgspec.to_builtins(config)
    settings["model"].pop("hf_token", None)
    return settings
