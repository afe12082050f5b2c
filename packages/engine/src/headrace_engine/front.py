"""The front of an engine, written once: input processing, checks, core requests, control calls, pooling,
scores, alignments, beam search.

What takes a while is a coroutine of :class:`EngineFront`, which waits only by its :class:`Waiting`. The
asynchronous engine (:mod:`headrace_engine.engine`) runs these coroutines on an event loop, the synchronous
one (:mod:`headrace_engine.offline`) in the caller's thread (:mod:`headrace_engine.stepping`).
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from headrace_core.arrays import PackedArray
from headrace_core.context import ENGINE, OWNER
from headrace_core.engine import AdmissionTicket, EngineStats, TokenizedPrompt
from headrace_core.errors import EngineDead, RequestError
from headrace_core.lora import LoRARequest
from headrace_core.output import BeamSearchOutput, RequestOutput
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.text import Tokenizer
from headrace_engine.beam_search import BeamSearchTask
from headrace_engine.clients.base import (
    CONTROL_TIMEOUT,
    PROFILE_TIMEOUT,
    CoreClient,
    WeakSink,
    no_answer,
)
from headrace_engine.guests import name_of
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.pooling import PoolingPrompt
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.input_processing.threads import size_of_texts
from headrace_engine.loop import OutputSink
from headrace_engine.lora.default_by_modality import default_adapter
from headrace_engine.lora.store import no_adapters
from headrace_engine.output_processing.output_processor import FollowedRequest, OutputProcessor
from headrace_engine.output_processing.pooled import PooledOutput
from headrace_engine.pooling.jobs import PoolingJob, WindowResults, read_job, windows_at_once
from headrace_engine.pooling.scores import Scored, ScorePlan
from headrace_engine.structured.admission import Admitted

SCALING_TIMEOUT = 3700.0
"""Longest wait for new engines, in seconds, a little longer than a start may take; what has begun goes on."""

T = TypeVar("T")


class Waiting(Protocol):
    """The way in which callers of an engine wait: on an event loop, or in a thread of their own."""

    def arriving(
        self, num_requests: int = 1, ticket: AdmissionTicket | None = None
    ) -> AbstractAsyncContextManager[Callable[[int], Awaitable[None]]]:
        """Context in which requests are taken in; they count as waiting meanwhile. It gives a function that
        is called with their number of tokens before they begin, and returns when they may begin.

        Args:
            ticket: of the call that they are part of; None: they are a call of their own.

        Raises:
            QueueFull: too many wait, or too many tokens do.
            EngineDead: the engine stopped.
        """
        ...

    def share(self, wanted: int | None = None) -> int:
        """Number of ``wanted`` requests of one call that may be under way together; None: of any
        number."""
        ...

    async def read(self, prompt: PoolingPrompt | Sequence[int], work: Callable[[], T]) -> T:
        """The result of ``work``, which looks at the whole of a prompt."""
        ...

    async def compute(self, work: Callable[[], T], size: int | None = None) -> T:
        """The result of ``work``, which looks at ``size`` characters; None: it is long."""
        ...

    async def admit(self, params: SamplingParams) -> Admitted | None:
        """The verdict on a constraint; None: it is found when the request is prepared."""
        ...

    async def answer(self, call: ControlCall[T]) -> T:
        """The answer of a call of the core."""
        ...

    def begin(self, request: PreparedRequest) -> Awaitable[Any]:
        """Start a request. The result, which must be awaited at once, is its last output.

        Raises (when awaited):
            GenerateError: the request failed, or was aborted without an output.
            EngineDead: the engine stopped.
        """
        ...

    async def together(
        self, work: Iterator[Coroutine[Any, Any, T]], at_once: int, take: Callable[[int, T], object]
    ) -> None:
        """Run coroutines, so many at once, taken from the iterator as others end.

        Args:
            take: gets (index, result) of each, in the order in which they are ready.

        Raises: what the first that fails raises; the others are ended.
        """
        ...


class ControlCall(Generic[T]):
    """A call of the core that is under way: awaited on an event loop, or :meth:`answer` in a thread.

    Args:
        called: gets the answer.
        seconds: longest wait for it.
        late: what is raised if it takes longer.
    """

    def __init__(self, called: Future[T], seconds: float, late: Exception) -> None:
        self._called = called
        self._seconds = seconds
        self._late = late

    def __await__(self) -> Generator[Any, Any, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await asyncio.wrap_future(self._called)
        except TimeoutError:
            if limit.expired():
                raise self._late from None
            raise  # of what was called

    def answer(self) -> T:
        """The answer; the calling thread waits."""
        try:
            return self._called.result(self._seconds)
        except TimeoutError:
            if self._called.done():  # it is of what was called, or the answer has come now
                return self._called.result(0)
            raise self._late from None


class EngineFront:
    """The side of an engine that has the text, over any :class:`CoreClient`.

    Args:
        client: not yet started.
        input_processor: knows tokenizer and model.
        waiting: how callers wait.
        stream_interval: tokens per streamed output.
        clamp_max_tokens: shorten ``max_tokens`` to what is left of the context, instead of refusing more.
    """

    def __init__(
        self,
        client: CoreClient,
        input_processor: InputProcessor,
        waiting: Waiting,
        *,
        stream_interval: int = 1,
        clamp_max_tokens: bool = False,
    ) -> None:
        self.client = client
        self.input_processor = input_processor
        self.processor = OutputProcessor(input_processor.tokenizer, stream_interval)
        """Follows the requests that are under way."""
        self.compute = waiting.compute
        """See :meth:`Waiting.compute`."""
        self._waiting = waiting
        self._clamp_max_tokens = clamp_max_tokens
        self._known_loras: set[LoRARequest] = set()
        """Adapters that the core has read; another front end may have had it forget them since."""

    def start(self, sink: OutputSink) -> None:
        """Start the core and wait until it is ready; ``sink`` gets its outputs.

        Raises:
            HeadraceError: whatever kept the core from starting.
        """
        self.client.start(WeakSink(sink))
        self.input_processor.limit_context(self.client.max_model_len)

    @property
    def model(self) -> ServedModel:
        """Facts about the model."""
        return self.input_processor.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None if none was loaded."""
        return self.input_processor.tokenizer

    def begin(self, request: PreparedRequest) -> FollowedRequest:
        """Hand a request to the core, and follow it from now on.

        Raises:
            RequestError: a request of that id is under way.
            EngineDead: the core stopped.
        """
        state = self.processor.add(request)
        begun = False
        try:
            self.client.add(request.core_requests)
            begun = True
        finally:
            if not begun:  # an error, or Ctrl-C: nobody would ever take its outputs
                self.processor.remove(state)
        return state

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        owner: str | None = None,
        lora_request: LoRARequest | None = None,
        engine: int | None = None,
    ) -> PreparedRequest:
        """A request for text, checked; see :meth:`InputProcessor.prepare`. The core knows its adapter.

        Args:
            owner: who shares the engine; None: as the caller's context says.
            engine: which of several computes it; None: as the caller's context says.

        Raises:
            RequestError: also, the adapter cannot be used; says why.
        """
        admitted = None
        if params.structured_outputs is not None:
            admitted = await self._waiting.admit(params)

        def prepared() -> PreparedRequest:
            return self.input_processor.prepare(
                prompt,
                params,
                request_id,
                priority=priority,
                add_special_tokens=add_special_tokens,
                clamp_max_tokens=self._clamp_max_tokens,
                admitted=admitted,
            )

        if lora_request is None:
            lora_request = default_adapter(self.input_processor.default_loras, prompt)
        # Preparing may happen in another thread, which has a context of its own.
        owner = OWNER.get() if owner is None else owner
        engine = ENGINE.get() if engine is None else engine
        request = (await self._waiting.read(prompt, prepared)).assign(owner, lora_request, engine)
        await self._know(lora_request)
        return request

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """The last output of a request.

        Raises: as :meth:`headrace_core.engine.EngineClient.generate`.
        """
        async with self._waiting.arriving(params.n) as admit:
            request = await self.prepare(
                prompt, params, request_id, priority=priority, lora_request=lora_request
            )
            await admit(request.num_tokens)
            running = self._waiting.begin(request)
        output: RequestOutput = await running
        return output

    async def encode(self, job: PoolingJob, ticket: AdmissionTicket | None = None) -> PooledOutput:
        """The result of a prompt that is pooled: of one request, or of one for each window.

        Args:
            ticket: of the call that the prompt is part of.

        Raises: as :meth:`headrace_core.engine.EngineClient.encode`.
        """
        pooling = self.input_processor.pooling
        ticket, running = ticket or AdmissionTicket(), None
        async with self._waiting.arriving(ticket=ticket) as admit:
            prompt = await self._waiting.read(job.prompt, partial(read_job, pooling, job))
            await self._know(job.lora_request)
            await admit(len(prompt.token_ids))
            if not prompt.window:
                running = self._begin_pooled(pooling.request(prompt), job.lora_request)
        if running is not None:
            return await running
        results = WindowResults(prompt)
        windows = (
            self._window(request, ticket, job.lora_request) for request in pooling.windows(prompt)
        )
        at_once = self._waiting.share(windows_at_once(prompt))
        await self._waiting.together(windows, at_once, results.add)
        return results.output()

    async def score(
        self,
        plan: Callable[[], ScorePlan],
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        on_output: Callable[[int, PooledOutput], None] | None = None,
    ) -> list[Scored]:
        """Scores of pairs.

        Args:
            plan: makes prompts of them (:meth:`headrace_engine.pooling.scores.ScorePlanner.plan`).
            on_output: gets (index, result) of each prompt.

        Raises: as :meth:`headrace_core.engine.EngineClient.score`.
        """
        planned = await self._waiting.compute(plan, size_of_texts(data_1) + size_of_texts(data_2))
        return planned.outputs(await self.encode_all(planned.jobs, self.encode, on_output))

    async def encode_all(
        self,
        jobs: Sequence[PoolingJob],
        encode: Callable[[PoolingJob, AdmissionTicket], Coroutine[Any, Any, PooledOutput]],
        on_output: Callable[[int, PooledOutput], None] | None = None,
    ) -> list[PooledOutput]:
        """Results of the prompts of one call, in order.

        Args:
            encode: pools one; :meth:`encode`, or what calls it.
            on_output: gets (index, result) of each, in the order in which they are ready.
        """
        ticket = AdmissionTicket()
        work = (encode(job, ticket) for job in jobs)
        return await self.results(work, self._waiting.share(), on_output)

    async def results(
        self,
        work: Iterator[Coroutine[Any, Any, T]],
        at_once: int,
        on_result: Callable[[int, T], object] | None = None,
    ) -> list[T]:
        """Results of coroutines that run side by side, in order.

        Args:
            on_result: gets (index, result) of each, in the order in which they are ready.

        Raises: as :meth:`Waiting.together`.
        """
        found: dict[int, T] = {}

        def take(index: int, result: T) -> None:
            found[index] = result
            if on_result is not None:
                on_result(index, result)

        await self._waiting.together(work, at_once, take)
        return [found[index] for index in range(len(found))]

    async def align(self, prompt: Prompt, request_id: str, *, priority: int = 0) -> PackedArray:
        """See :meth:`headrace_core.engine.EngineClient.align`."""
        async with self._waiting.arriving() as admit:
            prepare = self.input_processor.alignment.prepare
            request = await self._waiting.read(
                prompt, lambda: prepare(prompt, request_id, priority=priority)
            )
            await admit(request.num_tokens)
            running = self._begin_pooled(request)
        weights: PackedArray = (await running).outputs.data
        return weights

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """See :meth:`headrace_core.engine.EngineClient.beam_search`."""
        task = BeamSearchTask(
            self, prompt, params, request_id, priority, add_special_tokens, lora_request
        )
        await task.prepare()
        return await task.run()

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        """See :meth:`headrace_core.engine.EngineClient.tokenize`."""
        tokenize = self.input_processor.tokenize
        return await self._waiting.read(
            prompt, lambda: tokenize(prompt, add_special_tokens, strings)
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """See :meth:`headrace_core.engine.EngineClient.detokenize`."""
        detokenize = self.input_processor.detokenize
        return await self._waiting.read(
            token_ids, lambda: detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def stats(self, drain: bool = False) -> ControlCall[EngineStats]:
        """Counters and gauges of the core."""
        return self._control(self.client.stats(drain))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> ControlCall[bool]:
        """Forget cached blocks; False while requests hold some and may not be reset."""
        return self._control(self.client.reset_prefix_cache(reset_running_requests))

    def add_lora(self, request: LoRARequest) -> ControlCall[bool]:
        """See :meth:`headrace_core.engine.EngineClient.add_lora`.

        Raises:
            UnsupportedFeature: the engine takes no adapters.
        """
        if not self.model.max_loras:
            raise no_adapters()
        late = EngineDead(f"adapter {request.lora_name!r} was not read in {PROFILE_TIMEOUT:g} s")
        added = self.client.add_lora(request)
        added.add_done_callback(partial(self._note_known, request))
        return ControlCall(added, PROFILE_TIMEOUT, late)

    def remove_lora(self, lora_int_id: int) -> ControlCall[bool]:
        """See :meth:`headrace_core.engine.EngineClient.remove_lora`.

        Raises:
            UnsupportedFeature: the engine takes no adapters.
        """
        if not self.model.max_loras:
            raise no_adapters()
        for known in [one for one in list(self._known_loras) if one.lora_int_id == lora_int_id]:
            self._known_loras.discard(known)
        return self._control(self.client.remove_lora(lora_int_id))

    def list_loras(self) -> ControlCall[tuple[LoRARequest, ...]]:
        """See :meth:`headrace_core.engine.EngineClient.list_loras`."""
        return self._control(self.client.list_loras())

    def _note_known(self, request: LoRARequest, added: Future[bool]) -> None:
        if not added.cancelled() and added.exception() is None:
            self._known_loras.add(request)

    async def _know(self, lora_request: LoRARequest | None) -> None:
        """Have the core read an adapter, unless it has: what is wrong with it is the caller's error then."""
        if lora_request is not None and lora_request not in self._known_loras:
            await self._waiting.answer(self.add_lora(lora_request))

    def call_workers(
        self, method: str | Callable[..., Any], args: Sequence[Any], seconds: float
    ) -> ControlCall[list[Any]]:
        """Call a method of every worker, by its name, or a function with each worker: results by rank.

        Raises:
            RequestError: the method is neither a name nor a function.
            UnsupportedFeature: a function, and the workers are in another process.
        """
        if isinstance(method, str):
            name, called = method, self.client.call_workers(method, args)
        elif callable(method):
            name, called = name_of(method), self.client.run_on_workers(method, args)
        else:
            raise RequestError(
                f"method = {method!r:.100}: must be the name of a worker method, or a function",
                param="method",
            )
        return ControlCall(called, seconds, no_answer(f"collective_rpc: {name}", seconds))

    def apply_model(self, function: Callable[[Any], Any], seconds: float) -> ControlCall[list[Any]]:
        """Run a function on every worker's model: results by rank.

        Raises:
            UnsupportedFeature: the workers are in another process.
        """
        late = no_answer(f"apply_model: {name_of(function)}", seconds)
        return ControlCall(self.client.apply_model(function), seconds, late)

    def scale(self, num_engines: int, drain_timeout: float) -> ControlCall[int]:
        """See :meth:`headrace_core.engine.EngineClient.scale_elastic_ep`.

        Raises: as there, where it can be told at once.
        """
        seconds = SCALING_TIMEOUT + drain_timeout
        called = self.client.scale(num_engines, drain_timeout)
        return ControlCall(called, seconds, no_answer("scale_elastic_ep", seconds))

    async def _window(
        self, request: PreparedRequest, ticket: AdmissionTicket, lora_request: LoRARequest | None
    ) -> PooledOutput:
        """The result of one window of a long text."""
        async with self._waiting.arriving(ticket=ticket) as admit:
            await admit(request.num_tokens)
            running = self._begin_pooled(request, lora_request)
        return await running

    def _begin_pooled(
        self, request: PreparedRequest, lora_request: LoRARequest | None = None
    ) -> Awaitable[PooledOutput]:
        return self._waiting.begin(request.assign(OWNER.get(), lora_request, ENGINE.get()))

    def _control(self, called: Future[T]) -> ControlCall[T]:
        late = EngineDead(f"the engine gave no answer in {CONTROL_TIMEOUT:g} s")
        return ControlCall(called, CONTROL_TIMEOUT, late)
