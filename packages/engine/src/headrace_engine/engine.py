"""The engine as others see it: intake in front of a core, emission behind it.

:class:`Engine` is the asynchronous one, an :class:`~headrace_core.engine.EngineClient`.
:class:`OfflineEngine` is the synchronous one, for scripts: the calling thread takes each step's
outputs from a queue itself, so no event loop and no task switch stands between two tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import queue
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from headrace_core.config import EngineConfig
from headrace_core.engine import EngineStats, ServedModel, TokenizedPrompt
from headrace_core.errors import EngineDead, QueueFull, RequestError
from headrace_core.output import RequestOutput
from headrace_core.owner import OWNER
from headrace_core.request import ChatPrompt, Prompt
from headrace_core.sampling import RequestOutputKind, SamplingParams
from headrace_core.text import Tokenizer
from headrace_engine.clients.base import CoreClient, OutputSink
from headrace_engine.emission.output import RequestState
from headrace_engine.emission.processor import OutputProcessor, Processed
from headrace_engine.emission.stream import News, Outputs
from headrace_engine.intake.intake import Intake
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.messages import CoreOutputs
from headrace_engine.pause import PauseGate
from headrace_engine.structured.admission import Admitted

logger = logging.getLogger(__name__)

SMALL_PROMPT = 2048
"""Characters up to which a prompt is tokenised on the event loop: well under a millisecond."""
MAX_COMPILING = 256
"""Requests whose constraints may wait to be compiled; more are refused."""
INTAKE_THREADS = 2
"""Threads for larger prompts. The tokenizer releases the interpreter's lock."""
SLOW_STEP = 4.0
"""A step may take this many times what the largest one took at start, before the engine counts as
stuck: contexts are longer and machines busier than then."""
CONTROL_TIMEOUT = 60.0
"""Longest wait for an answer to a control call (statistics, cache reset), in seconds."""
PROFILE_TIMEOUT = 600.0
"""Longest wait for a trace to be written, in seconds: they can be large."""
PAUSE_POLL = 0.02
"""Seconds between looks whether the last request has ended."""
MAX_RETRY_AFTER = 60.0
"""Longest advice to a caller whose request was refused, in seconds."""
RECEIVE_WAIT = 1.0
"""Seconds after which a waiting :class:`OfflineEngine` looks whether the core still lives."""

Result = TypeVar("Result")


class _WeakSink:
    """Passes a core's outputs on as long as somebody holds the engine: the core's thread must not
    keep an engine alive that everybody else has forgotten."""

    def __init__(self, sink: OutputSink) -> None:
        self._sink = weakref.ref(sink)

    def on_outputs(self, outputs: CoreOutputs) -> None:
        sink = self._sink()
        if sink is not None:
            sink.on_outputs(outputs)

    def on_death(self, error: BaseException) -> None:
        sink = self._sink()
        if sink is not None:
            sink.on_death(error)


class Engine:
    """An :class:`~headrace_core.engine.EngineClient` over any :class:`CoreClient`.

    The constructor starts the core and waits until it is ready. All other methods belong to one
    asyncio event loop, the one that calls first.

    Args:
        client: not yet started.
        intake: knows tokenizer and model.
        config: resolved; the scheduler's part is read.
        heartbeat_limit: seconds without a round of the loop after which the engine counts as stuck;
            None: the configuration's, or :data:`SLOW_STEP` times what the largest step takes if
            that is more.

    Raises:
        HeadraceError: whatever kept the core from starting.
    """

    def __init__(
        self,
        client: CoreClient,
        intake: Intake,
        config: EngineConfig | None = None,
        *,
        heartbeat_limit: float | None = None,
    ) -> None:
        config = config or EngineConfig()
        scheduler = config.scheduler
        self._client = client
        self._intake = intake
        self._processor = OutputProcessor(intake.tokenizer, scheduler.stream_interval)
        self._max_queued = scheduler.max_queued_requests
        self._max_queued_tokens = scheduler.max_queued_tokens
        self._streams: dict[str, News] = {}
        self._pool = ThreadPoolExecutor(INTAKE_THREADS, thread_name_prefix="headrace-intake")
        self._grammar_pool = ThreadPoolExecutor(
            config.structured_outputs.compile_processes, thread_name_prefix="headrace-admission"
        )
        self._compiling = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: BaseException | None = None
        self._closing = False
        self._gate = PauseGate()
        self._config = config
        client.start(_WeakSink(self))
        intake.limit_context(client.max_model_len)
        self._heartbeat_limit = heartbeat_limit or max(
            config.observability.heartbeat_limit, SLOW_STEP * client.step_seconds
        )

    @property
    def model(self) -> ServedModel:
        return self._intake.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None if none was loaded."""
        return self._intake.tokenizer

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
        add_special_tokens: bool | None = None,
    ) -> Outputs:
        """See :meth:`headrace_core.engine.EngineClient.generate`."""

        owner = OWNER.get()  # of the caller's task; preparing may happen in another thread

        def take_in(admitted: Admitted | None) -> PreparedRequest:
            request = self._intake.prepare(
                prompt, params, request_id, priority=priority,
                add_special_tokens=add_special_tokens, admitted=admitted,
            )  # fmt: skip
            for core in request.core_requests:
                core.owner = owner
            return request

        async def prepare() -> PreparedRequest:
            admitted = None
            if params.structured_outputs is not None:
                admitted = await self._admit(params)
            return await self._off_loop_if_large(prompt, lambda: take_in(admitted))

        news = News()
        return Outputs(self._pull(news, params.n, prepare), news, self._raise_failure)

    async def _pull(
        self, news: News, n: int, prepare: Callable[[], Awaitable[PreparedRequest]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Take the request in and yield its outputs, as far as they are not poured."""
        self._check_open()
        self._check_queue(n)
        request = await prepare()
        await self._gate.passed()
        state = self._open_stream(request, news)
        try:
            while not state.exhausted:
                output = state.take()
                if output is not None and state.error is None:
                    yield output
                    continue
                self._raise_failure(state)
                await news.wait()
        finally:
            self._close_stream(state, news)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See :meth:`headrace_core.engine.EngineClient.abort`."""
        self._publish(self._processor.end(request_ids, "abort"))

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        """See :meth:`headrace_core.engine.EngineClient.tokenize`."""
        return await self._off_loop_if_large(
            prompt, lambda: self._intake.tokenize(prompt, add_special_tokens, strings)
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """See :meth:`headrace_core.engine.EngineClient.detokenize`."""
        return await self._off_loop_if_large(
            token_ids,
            lambda: self._intake.detokenize(token_ids, skip_special_tokens=skip_special_tokens),
        )

    async def stats(self, *, drain: bool = False) -> EngineStats:
        """See :meth:`headrace_core.engine.EngineClient.stats`."""
        stats = await self._answer(self._client.stats(drain))
        stats.heartbeat_age = self._client.heartbeat_age
        stats.num_requests_waiting += self._gate.num_held
        return stats

    async def check_health(self) -> None:
        """See :meth:`headrace_core.engine.EngineClient.check_health`."""
        if self.dead_error is not None:
            raise _dead_again(self.dead_error)
        age = self._client.heartbeat_age
        if age > self._heartbeat_limit:
            raise EngineDead(
                f"the engine has made no progress for {age:.1f} s (limit "
                f"{self._heartbeat_limit:g} s)"
            )

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See :meth:`headrace_core.engine.EngineClient.reset_prefix_cache`."""
        return await self._answer(self._client.reset_prefix_cache(reset_running_requests))

    async def pause_generation(
        self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """See :meth:`headrace_core.engine.EngineClient.pause_generation`."""
        self._check_open()
        self._gate.close()
        if not wait_for_inflight_requests:
            await self.abort([state.request.request_id for state in self._processor.states])
        while self._streams and self._gate.paused and self.dead_error is None:
            await asyncio.sleep(PAUSE_POLL)
        if self.dead_error is not None:
            raise _dead_again(self.dead_error)
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
        self._check_open()
        async with asyncio.timeout(CONTROL_TIMEOUT if timeout is None else timeout):
            return await asyncio.wrap_future(self._client.call_workers(method, args))

    @property
    def settings(self) -> Mapping[str, Any]:
        """See :attr:`headrace_core.engine.EngineClient.settings`."""
        return plain_settings(self._config)

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """See :meth:`headrace_core.engine.EngineClient.shutdown`. Idempotent."""
        self._closing = True
        self._gate.give_up()
        deadline = time.monotonic() + drain_timeout
        while self._streams and self.dead_error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.abort([state.request.request_id for state in self._processor.states])
        await asyncio.get_running_loop().run_in_executor(None, self._client.shutdown)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)
        self._intake.close()

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

    def _publish(self, processed: Processed) -> None:
        if processed.abort_core_ids:
            self._client.abort(processed.abort_core_ids)
        for state in processed.changed:
            news = self._streams.get(state.request.request_id)
            if news is not None:
                news.tell()

    def _wake_all(self) -> None:
        self._gate.give_up()
        for news in self._streams.values():
            news.wake()

    def _check_open(self) -> None:
        if self.dead_error is not None:
            raise _dead_again(self.dead_error)
        if self._closing:
            raise EngineDead("the engine is shutting down")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("this Engine belongs to another asyncio event loop")

    def _check_queue(self, n: int) -> None:
        waiting = self._processor.num_waiting + self._gate.num_held
        excess = waiting + n - self._max_queued
        if excess > 0:
            raise QueueFull(
                f"{waiting} completions wait already and {n} more would exceed "
                f"max_queued_requests = {self._max_queued}",
                retry_after=_retry_after(self._processor.seconds_until(num_starts=excess)),
            )

    def _check_queued_tokens(self, request: PreparedRequest) -> None:
        limit, waiting = self._max_queued_tokens, self._processor.num_waiting_tokens
        if limit is None or not waiting:
            return  # who finds nobody waiting is taken, however long: it could never be otherwise
        own = len(request.prompt_token_ids) * len(request.core_requests)
        excess = waiting + own - limit
        if excess > 0:
            raise QueueFull(
                f"prompts of {waiting} tokens wait already and {own} more would exceed "
                f"max_queued_tokens = {limit}",
                retry_after=_retry_after(
                    self._processor.seconds_until(num_tokens=min(excess, waiting))
                ),
            )

    async def _admit(self, params: SamplingParams) -> Admitted | None:
        """Let a constraint compile, in threads that nothing else waits for: nor do requests whose
        constraints are known, or refused at first sight."""
        loop = asyncio.get_running_loop()
        known = await loop.run_in_executor(self._pool, self._intake.known, params)
        if known is not None:
            return known
        if self._compiling >= MAX_COMPILING:
            raise QueueFull(
                f"{self._compiling} constraints wait already to be compiled", retry_after=1.0
            )
        self._compiling += 1
        try:
            return await loop.run_in_executor(self._grammar_pool, self._intake.admit, params)
        finally:
            self._compiling -= 1

    def _open_stream(self, request: PreparedRequest, news: News) -> RequestState:
        self._check_open()  # preparing may have taken a while
        self._check_queued_tokens(request)
        state = news.state = self._processor.add(request)
        self._streams[request.request_id] = news
        try:
            self._client.add(request.core_requests)
        except BaseException:
            self._close_stream(state, news)
            raise
        return state

    def _close_stream(self, state: RequestState, news: News) -> None:
        """Whatever still runs of the request is aborted: its consumer has gone."""
        request_id = state.request.request_id
        if self._streams.get(request_id) is news:
            del self._streams[request_id]
        core_ids = self._processor.remove(state)
        if core_ids and self.dead_error is None:
            with contextlib.suppress(EngineDead):
                self._client.abort(core_ids)

    def _raise_failure(self, state: RequestState) -> None:
        if state.error is not None:
            raise state.error
        if self.dead_error is not None:
            raise _dead_again(self.dead_error)

    async def _answer(self, future: Future[Result]) -> Result:
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer in {CONTROL_TIMEOUT:g} s") from None

    async def _off_loop_if_large(
        self, prompt: Prompt | Sequence[int], work: Callable[[], Result]
    ) -> Result:
        if _size(prompt) <= SMALL_PROMPT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class OfflineEngine:
    """The synchronous engine. Used from one thread.

    The constructor starts the core and waits until it is ready.

    Args:
        client: not yet started.
        intake: knows tokenizer and model.

    Raises:
        HeadraceError: whatever kept the core from starting.
    """

    def __init__(self, client: CoreClient, intake: Intake) -> None:
        self._client = client
        self._intake = intake
        self._processor = OutputProcessor(intake.tokenizer)
        self._inbox: queue.SimpleQueue[CoreOutputs | BaseException] = queue.SimpleQueue()
        self._aborted: list[RequestState] = []
        self._serial = 0
        client.start(_WeakSink(self))
        intake.limit_context(client.max_model_len)

    @property
    def model(self) -> ServedModel:
        """Facts about the model."""
        return self._intake.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None if none was loaded."""
        return self._intake.tokenizer

    @property
    def client(self) -> CoreClient:
        """The way to the core, with its start timeline and memory plan."""
        return self._client

    def run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        priority: Sequence[int] | None = None,
        add_special_tokens: bool | None = None,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Run requests to their ends.

        Args:
            prompts: any forms, mixed.
            params: one for all, or one per prompt.
            priority: one per prompt, under the priority policy.
            add_special_tokens: None: yes for text, no for chats.
            on_output: called with (index of the prompt, output) as outputs become ready; with the
                output kinds CUMULATIVE and DELTA also while a request runs. Must not raise.

        Returns:
            One final, cumulative output per prompt, in order. A request that failed inside the
            engine has finish reason ``error``; the log says why.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing is left running.
            EngineDead: the engine stopped.
            KeyboardInterrupt: everything that was pending has been aborted.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        for name, values in (("params", every), ("priority", priority)):
            if values is not None and len(values) != len(prompts):
                raise RequestError(
                    f"{name}: {len(values)} values for {len(prompts)} prompts", param=name
                )
        pending: dict[str, int] = {}
        finals: dict[int, RequestOutput] = {}
        try:
            for index, prompt in enumerate(prompts):
                request_id = self._next_id()
                self.add_request(
                    request_id,
                    prompt,
                    every[index],
                    priority=priority[index] if priority is not None else 0,
                    add_special_tokens=add_special_tokens,
                )
                pending[request_id] = index
            while pending:
                for output in self.step():
                    index = pending.get(output.request_id, -1)
                    if index < 0:
                        continue  # a request that was added beside this run
                    _collect(finals, index, output, every[index])
                    if on_output is not None:
                        on_output(index, output)
                    if output.finished:
                        del pending[output.request_id]
        except BaseException:
            self._drop(list(pending))
            raise
        return [finals[index] for index in range(len(prompts))]

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
    ) -> None:
        """Queue one request; :meth:`step` returns its outputs.

        Raises:
            RequestError: the prompt or its parameters are wrong, or the id is in use.
            EngineDead: the engine stopped.
        """
        request = self._intake.prepare(
            prompt,
            params,
            request_id,
            priority=priority,
            add_special_tokens=add_special_tokens,
            clamp_max_tokens=True,
        )
        state = self._processor.add(request)
        try:
            self._client.add(request.core_requests)
        except BaseException:
            self._processor.remove(state)
            raise

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has anything to wait for."""
        return bool(self._processor.states)

    def step(self) -> list[RequestOutput]:
        """Wait for the next outputs; [] at once if nothing is under way.

        Raises:
            EngineDead: the engine stopped; all requests are gone.
        """
        if not self.has_unfinished_requests():
            return []
        changed, self._aborted = self._aborted, []
        if not changed:
            processed = self._processor.process(self._receive())
            if processed.abort_core_ids:
                self._client.abort(processed.abort_core_ids)
            changed = processed.changed
        outputs = []
        for state in changed:
            output = state.take()
            if output is not None:
                outputs.append(output)
            if state.finished:
                self._processor.remove(state)
                if state.error is not None:
                    logger.error("%s", state.error)
        return outputs

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """End requests with finish reason ``abort``; their last outputs come with :meth:`step`."""
        processed = self._processor.end(request_ids, "abort")
        self._client.abort(processed.abort_core_ids)
        self._aborted += processed.changed

    def stats(self, *, drain: bool = False) -> EngineStats:
        """Counters and gauges of the core."""
        return self._client.stats(drain).result(CONTROL_TIMEOUT)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False while requests hold some and may not be reset."""
        return self._client.reset_prefix_cache(reset_running_requests).result(CONTROL_TIMEOUT)

    def shutdown(self) -> None:
        """Stop the core and free everything. Idempotent."""
        self._client.shutdown()
        self._intake.close()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def collective_rpc(
        self, method: str, *, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """As :meth:`headrace_core.engine.EngineClient.collective_rpc`."""
        if not isinstance(method, str):
            raise RequestError(
                f"method = {method!r}: must be a name; functions are not called", param="method"
            )
        return self._client.call_workers(method, args).result(timeout or PROFILE_TIMEOUT)

    # OutputSink: called from a thread of the client's.

    def on_outputs(self, outputs: CoreOutputs) -> None:
        """Queue a step's outputs for :meth:`step`."""
        self._inbox.put(outputs)

    def on_death(self, error: BaseException) -> None:
        """Make :meth:`step` raise."""
        self._inbox.put(error)

    def _receive(self) -> CoreOutputs:
        while True:
            try:
                received = self._inbox.get(timeout=RECEIVE_WAIT)
            except queue.Empty:
                if self._client.failure is None:
                    continue
                received = self._client.failure
            if isinstance(received, CoreOutputs):
                return received
            for state in self._processor.states:
                self._processor.remove(state)
            raise _dead_again(received)

    def _drop(self, request_ids: Sequence[str]) -> None:
        """End requests of which nobody will ask for more."""
        core_ids = []
        for request_id in request_ids:
            state = self._processor.get(request_id)
            if state is not None:
                core_ids += self._processor.remove(state)
        if core_ids and self._client.failure is None:
            self._client.abort(core_ids)

    def _next_id(self) -> str:
        self._serial += 1
        return f"offline-{self._serial}"


def _retry_after(seconds: float) -> float:
    return min(MAX_RETRY_AFTER, max(1.0, math.ceil(seconds)))


def _collect(
    finals: dict[int, RequestOutput], index: int, output: RequestOutput, params: SamplingParams
) -> None:
    """Keep what a request has yielded so far as one cumulative output."""
    if params.output_kind is not RequestOutputKind.DELTA:
        finals[index] = output
    elif index in finals:
        finals[index].add(output, aggregate=True)
    else:
        finals[index] = copy.deepcopy(output)  # the caller's own is not to grow


def _size(prompt: Prompt | Sequence[int]) -> int:
    """Roughly how many characters or tokens an intake must look at; forms are checked there."""
    if isinstance(prompt, ChatPrompt):
        # A template of the request's own runs in another process, and large inputs take a while.
        if prompt.chat_template is not None or prompt.tools or prompt.documents:
            return SMALL_PROMPT + 1
        return sum(map(_size_of_message, prompt.messages))
    given: object = prompt
    if isinstance(prompt, Mapping):
        if prompt.get("prompt_embeds") is not None:
            return SMALL_PROMPT + 1  # decoded in another process
        given = prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(given) if isinstance(given, Sized) else 0


def _size_of_message(message: object) -> int:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return 16 + sum(len(text) for text in texts if isinstance(text, str))


def plain_settings(config: EngineConfig) -> dict[str, Any]:
    """A configuration as plain data; the hub's token is left out."""
    settings: dict[str, Any] = msgspec.to_builtins(config)
    settings["model"].pop("hf_token", None)
    return settings


def _dead_again(error: BaseException) -> EngineDead:
    """A new exception for each consumer: one object's traceback must not be shared."""
    dead = EngineDead(str(error))
    dead.__cause__ = error
    return dead
