"""The engine as a server sees it: intake in front of a core, emission behind it.

:class:`Engine` is the asynchronous one, an :class:`~headrace_core.engine.EngineClient`; the synchronous
one is :class:`headrace_engine.offline.OfflineEngine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeGuard, TypeVar

import msgspec

from headrace_core.call_entry import CallEntry
from headrace_core.config import EngineConfig
from headrace_core.engine import EngineStats, ServedModel, TokenizedPrompt
from headrace_core.errors import EngineDead, GenerateError
from headrace_core.io_processor import IOProcessor
from headrace_core.output import RequestOutput
from headrace_core.owner import OWNER
from headrace_core.packed import PackedArray
from headrace_core.pooling import PoolingParams
from headrace_core.request import Prompt
from headrace_core.sampling import SamplingParams
from headrace_core.scoring import ScoreInput
from headrace_core.speech import SpeechModel
from headrace_core.text import Tokenizer
from headrace_engine.clients.base import CONTROL_TIMEOUT, PROFILE_TIMEOUT, CoreClient, no_answer
from headrace_engine.clients.sink import WeakSink, dead_again
from headrace_engine.emission.output import RequestState
from headrace_engine.emission.pooled import PooledOutput, PooledState
from headrace_engine.emission.processor import Followed, OutputProcessor, Processed
from headrace_engine.emission.stream import News, Outputs
from headrace_engine.guests import name_of
from headrace_engine.intake.intake import Intake
from headrace_engine.intake.pooling import PooledPrompt
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.intake.threads import IntakeThreads, size_of_texts
from headrace_engine.messages import CoreOutputs
from headrace_engine.pause import PauseGate
from headrace_engine.pooling.bounded import run_bounded
from headrace_engine.pooling.jobs import Gathering, Job, read_job, windows_at_once
from headrace_engine.pooling.scores import AT_ONCE, Scored
from headrace_engine.queue_limits import QueueLimits
from headrace_engine.structured.admission import Admitted

logger = logging.getLogger(__name__)

SLOW_STEP = 4.0
"""A step may take this many times what the largest one took at start, before the engine counts as
stuck: contexts are longer and machines busier than then."""
UNREAD_BYTES = 8 * 1024
"""About what an output may hold that its reader has not taken, before its request is suspended. With what
waits in a socket it stays below the 64 KiB that a slow reader may cost."""
PAUSE_POLL = 0.02
"""Seconds between looks whether the last request has ended."""

Result = TypeVar("Result")


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
        speech: speech to text, if the model does that.
        io_processor: answers requests of the task ``plugin``.

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
        speech: SpeechModel | None = None,
        io_processor: IOProcessor | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.speech = speech
        """See :attr:`headrace_core.engine.EngineClient.speech`."""
        self.io_processor = io_processor
        """See :attr:`headrace_core.engine.EngineClient.io_processor`."""
        scheduler = config.scheduler
        self._client = client
        self._intake = intake
        self._processor = OutputProcessor(intake.tokenizer, scheduler.stream_interval)
        self._limits = QueueLimits(scheduler, self._processor)
        self._streams: dict[str, News] = {}
        self._threads = IntakeThreads(intake, config.structured_outputs.compile_processes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: BaseException | None = None
        self._closing = False
        self._gate = PauseGate()
        self._config = config
        client.start(WeakSink(self))
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
                admitted = await self._threads.admit(params)
            return await self._threads.run(prompt, lambda: take_in(admitted))

        news = News()
        return Outputs(self._pull(news, params.n, prepare), news, self._raise_failure)

    async def _pull(
        self, news: News, n: int, prepare: Callable[[], Awaitable[PreparedRequest]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Take the request in and yield its outputs, as far as they are not poured."""
        try:
            self._check_open()
            with self._limits.arriving(n):
                request = await prepare()
                await self._gate.passed()
                num_tokens = len(request.prompt_token_ids) * len(request.core_requests)
                self._limits.check_tokens(num_tokens)
                state = self._open_stream(request, news)
        finally:
            news.decided.set()
        assert isinstance(state, RequestState)
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

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        task: str,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        entry: CallEntry | None = None,
    ) -> PooledOutput:
        """See :meth:`headrace_core.engine.EngineClient.encode`."""
        job = Job(prompt, params, task, request_id, priority, add_special_tokens)
        entry = entry or CallEntry()
        async with entry.place(self._limits.share(AT_ONCE)):
            return await self._encode(job, entry)

    async def score(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        chat_template: str | None = None,
    ) -> list[Scored]:
        """See :meth:`headrace_core.engine.EngineClient.score`."""
        self._check_open()
        plan = await self._threads.run_sized(
            size_of_texts(data_1) + size_of_texts(data_2),
            lambda: self._intake.scores.plan(
                data_1, data_2, params, request_id, priority=priority, chat_template=chat_template
            ),
        )
        results: dict[int, PooledOutput] = {}
        entry = CallEntry()
        prompts = (self._encode(job, entry) for job in plan.jobs)
        await run_bounded(prompts, self._limits.share(AT_ONCE), results.__setitem__)
        return plan.outputs([results[index] for index in range(len(plan.jobs))])

    async def _encode(self, job: Job, entry: CallEntry) -> PooledOutput:
        """Take in a prompt, run its requests, and wait for the result."""
        self._check_open()
        taken = None
        async with entry.door:  # nobody waits long: whoever finds it let in goes on at once
            if not entry.let_in:
                with self._limits.arriving(1):
                    taken = await self._take_in_pooled(job, check_tokens=True)
                entry.let_in = True
        prompt, opened = taken or await self._take_in_pooled(job, check_tokens=False)
        if opened is not None:
            return await self._result(*opened)
        gathering = Gathering(prompt)
        windows = map(self._window, self._intake.pooling.windows(prompt))
        at_once = self._limits.share(windows_at_once(prompt))
        await run_bounded(windows, at_once, gathering.add)
        return gathering.output()

    async def _take_in_pooled(
        self, job: Job, *, check_tokens: bool
    ) -> tuple[PooledPrompt, tuple[Followed, News] | None]:
        """Read a prompt, and begin it unless it must be computed in windows."""
        intake = self._intake.pooling
        prompt = await self._threads.run(job.prompt, lambda: read_job(intake, job))
        await self._gate.passed()
        if check_tokens:
            self._limits.check_tokens(len(prompt.token_ids))
        return prompt, None if prompt.window else self._open_pooled(intake.request(prompt))

    async def _window(self, request: PreparedRequest) -> PooledOutput:
        """One window of a long text."""
        await self._gate.passed()
        return await self._result(*self._open_pooled(request))

    def _open_pooled(self, request: PreparedRequest) -> tuple[Followed, News]:
        for core in request.core_requests:
            core.owner = OWNER.get()
        news = News()
        return self._open_stream(request, news), news

    async def _result(self, state: Followed, news: News) -> PooledOutput:
        """Of a pooling request that is under way; whoever is cancelled here aborts it."""
        assert isinstance(state, PooledState)
        try:
            while not state.ready:
                self._raise_failure(state)
                await news.wait()
            output = state.take()
            if output is not None:
                return output
            self._raise_failure(state)
            raise GenerateError(f"request {state.request.request_id!r} was aborted")
        finally:
            self._close_stream(state, news)

    async def align(self, prompt: Prompt, request_id: str, *, priority: int = 0) -> PackedArray:
        """See :meth:`headrace_core.engine.EngineClient.align`."""
        self._check_open()
        with self._limits.arriving(1):
            intake = self._intake.alignment
            request = await self._threads.run(
                prompt, lambda: intake.prepare(prompt, request_id, priority=priority)
            )
            await self._gate.passed()
            self._limits.check_tokens(len(request.prompt_token_ids))
            opened = self._open_pooled(request)
        weights: PackedArray = (await self._result(*opened)).outputs.data
        return weights

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See :meth:`headrace_core.engine.EngineClient.abort`."""
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
        return await self._threads.run(
            prompt, lambda: self._intake.tokenize(prompt, add_special_tokens, strings)
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """See :meth:`headrace_core.engine.EngineClient.detokenize`."""
        return await self._threads.run(
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
            raise dead_again(self.dead_error)
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
        self._check_open()
        called = self._client.call_workers(method, args)
        return await _of_workers(f"collective_rpc: {method}", called, timeout)

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
        self._check_open()
        called = self._client.run_on_workers(function, args)
        return await _of_workers(f"collective_rpc: {name_of(function)}", called, timeout)

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
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._client.shutdown)
        finally:
            self._threads.close()
            self._intake.close()
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

    def _publish(self, processed: Processed) -> None:
        if processed.abort_core_ids:
            self._client.abort(processed.abort_core_ids)
        behind = []
        for state in processed.changed:
            news = self._streams.get(state.request.request_id)
            if news is not None:
                news.tell()
                if self._is_behind(state):
                    behind.append(state)
        if behind and self._loop is not None:
            # Readers that were woken just now come first.
            self._loop.call_soon(self._suspend, behind)

    def _is_behind(self, state: Followed) -> TypeGuard[RequestState]:
        """True if much of a request that goes on was not taken, and it is not suspended yet."""
        return (
            isinstance(state, RequestState)
            and state.on_taken is None
            and state.ready  # else nobody could take anything (--stream-interval)
            and state.num_untaken_bytes > UNREAD_BYTES
            and not state.finished
            and not self._gate.paused  # whoever pauses generation waits for what runs
        )

    def _suspend(self, states: Sequence[RequestState]) -> None:
        """Stop computing what nobody reads, until it is read."""
        if self._closing or self.dead_error is not None:
            return
        for state in states:
            if self._is_behind(state):
                core_ids = state.unfinished_core_ids
                state.on_taken = functools.partial(self._resume, core_ids)
                self._client.suspend(core_ids)

    def _resume(self, core_ids: Sequence[str]) -> None:
        if self.dead_error is None:
            self._client.resume(core_ids)

    def _resume_all(self) -> None:
        """Go on whether anybody reads or not."""
        for state in self._processor.states:
            if isinstance(state, RequestState) and state.on_taken is not None:
                on_taken, state.on_taken = state.on_taken, None
                on_taken()

    def _wake_all(self) -> None:
        self._gate.give_up()
        for news in self._streams.values():
            news.wake()

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

    def _open_stream(self, request: PreparedRequest, news: News) -> Followed:
        self._check_open()  # preparing may have taken a while
        state = news.state = self._processor.add(request)
        self._streams[request.request_id] = news
        try:
            self._client.add(request.core_requests)
        except BaseException:
            self._close_stream(state, news)
            raise
        return state

    def _close_stream(self, state: Followed, news: News) -> None:
        """Whatever still runs of the request is aborted: its consumer has gone."""
        request_id = state.request.request_id
        if self._streams.get(request_id) is news:
            del self._streams[request_id]
        core_ids = self._processor.remove(state)
        if core_ids and self.dead_error is None:
            with contextlib.suppress(EngineDead):
                self._client.abort(core_ids)

    def _raise_failure(self, state: Followed) -> None:
        if state.error is not None:
            raise state.error
        if self.dead_error is not None:
            raise dead_again(self.dead_error)

    async def _answer(self, future: Future[Result]) -> Result:
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer in {CONTROL_TIMEOUT:g} s") from None


async def _of_workers(call: str, called: Future[Result], timeout: float | None) -> Result:
    """The answer of workers.

    Args:
        call: for the error (:func:`~headrace_engine.clients.base.no_answer`).
        timeout: seconds; None: :data:`CONTROL_TIMEOUT`.

    Raises:
        TimeoutError: there was none in time.
    """
    seconds = CONTROL_TIMEOUT if timeout is None else timeout
    try:
        async with asyncio.timeout(seconds) as limit:
            return await asyncio.wrap_future(called)
    except TimeoutError:
        if limit.expired():
            raise no_answer(call, seconds) from None
        raise  # of what was called


def plain_settings(config: EngineConfig) -> dict[str, Any]:
    """A configuration as plain data; the hub's token is left out."""
    settings: dict[str, Any] = msgspec.to_builtins(config)
    settings["model"].pop("hf_token", None)
    return settings
