"""The synchronous engine, for scripts: :class:`OfflineEngine`.

A calling thread takes each step's outputs from a queue itself, so no event loop and no task switch
comes between two tokens (:mod:`headrace_engine.calls`). What waits for several requests are coroutines of
the :class:`~headrace_engine.front.EngineFront`, run in the same thread (:mod:`headrace_engine.stepping`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from headrace_core.arrays import PackedArray
from headrace_core.context import OWNER
from headrace_core.engine import AdmissionTicket, EngineStats
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.output import BeamSearchOutput, PoolingRequestOutput, RequestOutput
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.text import Tokenizer
from headrace_engine.beam_search import BeamSearchTask
from headrace_engine.calls import OfflineCall, OfflineCalls, RequestObserver, RequestUpdate
from headrace_engine.clients.base import PROFILE_TIMEOUT, CoreClient
from headrace_engine.front import EngineFront
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.output_processing.pooled import PooledOutput
from headrace_engine.pooling.jobs import PoolingJob, read_job
from headrace_engine.pooling.scores import Scored
from headrace_engine.request_ids import as_request_ids
from headrace_engine.stepping import CoroutineStepper, ThreadWaiting, result_at_once
from headrace_engine.transcription.calls import ClipRequests

T = TypeVar("T")


class EngineObserver(RequestObserver, Protocol):
    """Follows all requests of an offline engine, for metrics."""

    def pooled(
        self, task: str, outputs: Sequence[PoolingRequestOutput[Any]], started: float
    ) -> None:
        """Prompts, or pairs with the task ``score``, were pooled.

        Args:
            started: when they came, by ``time.monotonic()``.
        """
        ...

    def pooling_ended(self, reason: str) -> None:
        """A prompt ended without a result; the reason is ``error`` or ``abort``."""
        ...


class OfflineBatch:
    """Requests that were started together and end as one list of outputs. Leaving the ``with`` block
    aborts the requests that still run. Belongs to one thread at a time.

    Args:
        call: holds the requests.
        requests: their parameters by request id, in order.
    """

    def __init__(self, call: OfflineCall, requests: dict[str, SamplingParams]) -> None:
        self._call = call
        self._params = list(requests.values())
        self._index = {request_id: index for index, request_id in enumerate(requests)}
        self.request_ids: list[str] = list(requests)
        """In the order of the prompts."""

    def wait(
        self, on_output: Callable[[int, RequestOutput], None] | None = None
    ) -> list[RequestOutput]:
        """Wait until all have ended; to be called once. Arguments, result and errors as
        :meth:`OfflineEngine.run`; whatever it raises, the requests that still run are aborted."""
        finals: dict[int, RequestOutput] = {}
        with self._call as call:
            while call.num_unfinished:
                for request_id, output, _, _ in call.wait():
                    assert isinstance(output, RequestOutput)
                    index = self._index[request_id]
                    _collect(finals, index, output, self._params[index])
                    if on_output is not None:
                        on_output(index, output)
        return [finals[index] for index in range(len(self.request_ids))]

    def close(self) -> None:
        """Abort the requests that still run. Idempotent."""
        self._call.close()

    def __enter__(self) -> OfflineBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OfflineEngine:
    """The synchronous engine. Thread-safe: calls of several threads run together, in the same steps.

    The constructor starts the core and waits until it is ready.

    Args:
        client: not yet started.
        input_processor: knows tokenizer and model.
        observer: follows all requests; None: nobody does.

    Raises:
        HeadraceError: whatever kept the core from starting.
    """

    def __init__(
        self,
        client: CoreClient,
        input_processor: InputProcessor,
        observer: EngineObserver | None = None,
    ) -> None:
        self._client = client
        ended = None if observer is None else observer.pooling_ended
        self._front = EngineFront(
            client, input_processor, ThreadWaiting(ended), clamp_max_tokens=True
        )
        self._observer = observer
        self._calls = OfflineCalls(self._front, observer)
        self._own = self._calls.open()
        self._own_pooling: dict[str, tuple[str, float]] = {}
        """Pooling requests of :meth:`add_request`: id -> (task, when it came); only for an observer."""
        self._serial = itertools.count(1)  # next() is atomic
        self._front.start(self._calls)

    @property
    def model(self) -> ServedModel:
        """Facts about the model."""
        return self._front.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None if none was loaded."""
        return self._front.tokenizer

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
        lora_requests: Sequence[LoRARequest | None] | None = None,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Run requests to their ends.

        Args:
            prompts: any forms, mixed.
            params: one for all, or one per prompt.
            priority: one per prompt, under the priority policy.
            add_special_tokens: None: yes for text, no for chats.
            lora_requests: one per prompt, None for the base model; None: all with the base model.
            on_output: called with (index of the prompt, output) as outputs become ready; with the
                output kinds CUMULATIVE and DELTA also while a request runs. Must not raise.

        Returns:
            One final, cumulative output per prompt, in order. A completion that failed inside the
            engine has finish reason ``error``, and its ``error`` says why.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing is left running.
            EngineDead: the engine stopped.
            KeyboardInterrupt: everything that was pending has been aborted.
        """
        with self.start(
            prompts,
            params,
            priority=priority,
            add_special_tokens=add_special_tokens,
            lora_requests=lora_requests,
        ) as batch:
            return batch.wait(on_output)

    def start(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        priority: Sequence[int] | None = None,
        add_special_tokens: bool | None = None,
        lora_requests: Sequence[LoRARequest | None] | None = None,
        on_added: Callable[[], None] | None = None,
    ) -> OfflineBatch:
        """Queue requests and return at once; :meth:`OfflineBatch.wait` returns their outputs.

        Args:
            prompts, params, priority, add_special_tokens, lora_requests: as :meth:`run`.
            on_added: called after each request was queued.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing is left running.
            EngineDead: the engine stopped.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        _check_one_each(prompts, params=every, priority=priority, lora_request=lora_requests)
        requests: dict[str, SamplingParams] = {}
        with contextlib.ExitStack() as undo:
            call = undo.enter_context(self._calls.open())
            for index, prompt in enumerate(prompts):
                request_id = self._next_id()
                self.add_request(
                    request_id,
                    prompt,
                    every[index],
                    priority=priority[index] if priority is not None else 0,
                    add_special_tokens=add_special_tokens,
                    lora_request=lora_requests[index] if lora_requests is not None else None,
                    call=call,
                )
                requests[request_id] = every[index]
                if on_added is not None:
                    on_added()
            undo.pop_all()
        return OfflineBatch(call, requests)

    def stepper(self) -> CoroutineStepper:
        """A driver of coroutines that wait for requests of this engine: many, side by side."""
        return CoroutineStepper(self._calls)

    def clip_requests(self) -> ClipRequests:
        """The requests of recordings' clips, for coroutines that a :meth:`stepper` drives."""
        front = self._front
        return ClipRequests(front, front.complete, self._next_id(), front.compute)

    def paused(self, *, wait: bool) -> contextlib.AbstractContextManager[None]:
        """See :meth:`headrace_engine.calls.OfflineCalls.paused`."""
        return self._calls.paused(wait=wait)

    def open_call(self) -> OfflineCall:
        """A place for requests whose outputs :meth:`step` does not return, but the call itself."""
        return self._calls.open()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
        call: OfflineCall | None = None,
    ) -> None:
        """Queue one request; :meth:`step` returns its outputs.

        Args:
            call: of :meth:`open_call`, which returns them instead.
            params: of pooling, with a ``task``: the request has one output, a
                :class:`~headrace_core.output.PoolingRequestOutput`.
            lora_request: the adapter that it is computed with; it is read first, if it was not.

        Raises:
            RequestError: the prompt or its parameters are wrong, or the id is in use.
            EngineDead: the engine stopped.
        """
        started = time.monotonic()
        request = self._prepared(
            request_id, prompt, params, priority, add_special_tokens, lora_request
        )
        (call or self._own).add(request)
        if call is None and self._observer is not None and isinstance(params, PoolingParams):
            self._own_pooling[request_id] = (params.task or "", started)

    def _prepared(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int,
        add_special_tokens: bool | None,
        lora_request: LoRARequest | None,
    ) -> PreparedRequest:
        if isinstance(params, SamplingParams):
            return result_at_once(
                self._front.prepare(
                    prompt,
                    params,
                    request_id,
                    priority=priority,
                    add_special_tokens=add_special_tokens,
                    lora_request=lora_request,
                )
            )
        if params.task is None:
            tasks = ", ".join(self.model.tasks)
            raise RequestError(
                f"task = None: must be one of those that the model has: {tasks}", param="task"
            )
        pooling = self._front.input_processor.pooling
        job = PoolingJob(prompt, params, params.task, request_id, priority, add_special_tokens)
        pooled = read_job(pooling, job)
        if pooled.window:
            raise UnsupportedFeature(
                f"prompt: {len(pooled.token_ids)} tokens are several windows; `encode` computes them",
                param="prompt",
            )
        if lora_request is not None:
            self.add_lora(lora_request)
        return pooling.request(pooled).assign(OWNER.get(), lora_request)

    def encode(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams],
        *,
        task: str,
        priority: Sequence[int] | None = None,
        add_special_tokens: bool | None = None,
        lora_requests: Sequence[LoRARequest | None] | None = None,
        on_output: Callable[[int, PooledOutput], None] | None = None,
    ) -> list[PooledOutput]:
        """Pool prompts.

        Args:
            params: one for all, or one per prompt; not changed.
            task: see :meth:`headrace_core.engine.EngineClient.encode`.
            lora_requests: as :meth:`run`.
            on_output: called with (index of the prompt, result) as results become ready. Must not
                raise.

        Returns:
            One result per prompt, in order; ``outputs.data`` is a
            :class:`~headrace_core.arrays.PackedArray`.

        Raises:
            UnsupportedFeature, RequestError: as :meth:`headrace_core.engine.EngineClient.encode`;
                nothing is left running.
            GenerateError: a prompt failed.
            EngineDead: the engine stopped.
        """
        every = [params] * len(prompts) if isinstance(params, PoolingParams) else list(params)
        _check_one_each(
            prompts, pooling_params=every, priority=priority, lora_request=lora_requests
        )
        jobs = [
            PoolingJob(
                prompt,
                every[index],
                task,
                self._next_id(),
                priority[index] if priority is not None else 0,
                add_special_tokens,
                lora_request=lora_requests[index] if lora_requests is not None else None,
            )
            for index, prompt in enumerate(prompts)
        ]
        started, front, observer = time.monotonic(), self._front, self._observer

        async def encode(job: PoolingJob, ticket: AdmissionTicket) -> PooledOutput:
            result = await front.encode(job, ticket)
            if observer is not None:
                observer.pooled(task, [result], started)
            return result

        return self._result(front.encode_all(jobs, encode, on_output))

    def score(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams,
        *,
        chat_template: str | None = None,
        add_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
        on_output: Callable[[int, PooledOutput], None] | None = None,
    ) -> list[Scored]:
        """Score pairs; see :meth:`headrace_core.engine.EngineClient.score`.

        Args:
            add_special_tokens, lora_request: see
                :meth:`headrace_engine.pooling.scores.ScorePlanner.plan`.
            on_output: called with (index, result) for each prompt that is pooled for them.
        """
        started = time.monotonic()
        plan = partial(
            self._front.input_processor.scores.plan,
            data_1, data_2, params, self._next_id(),
            chat_template=chat_template, add_special_tokens=add_special_tokens,
            lora_request=lora_request,
        )  # fmt: skip
        scored = self._result(self._front.score(plan, data_1, data_2, on_output))
        if self._observer is not None:
            self._observer.pooled("score", scored, started)
        return scored

    def beam_search(
        self,
        prompts: Sequence[Prompt],
        params: BeamSearchParams,
        *,
        at_once: int | None = None,
        lora_requests: Sequence[LoRARequest | None] | None = None,
        on_output: Callable[[int, BeamSearchOutput], object] | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the likeliest continuations of prompts; see
        :meth:`headrace_core.engine.EngineClient.beam_search`.

        Args:
            at_once: prompts that are searched at the same time; None: all.
            lora_requests: as :meth:`run`.
            on_output: called with (index of the prompt, output) as searches end. Must not raise.

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing has run.
        """
        _check_one_each(prompts, lora_request=lora_requests)
        tasks = [
            BeamSearchTask(self._front, prompt, params, self._next_id(), lora_request=lora)
            for prompt, lora in zip(prompts, lora_requests or [None] * len(prompts))
        ]
        for task in tasks:
            result_at_once(task.prepare())
        work = (task.run() for task in tasks)
        return self._result(self._front.results(work, at_once or len(tasks), on_output))

    def align(self, prompts: Sequence[Prompt]) -> list[PackedArray]:
        """The part of its media that each token of a sequence comes from; see
        :meth:`headrace_core.engine.EngineClient.align`.

        Raises: as :meth:`encode`.
        """
        work = (self._front.align(prompt, self._next_id()) for prompt in prompts)
        return self._result(self._front.results(work, len(prompts)))

    def _result(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the front; if it fails, its requests are aborted."""
        with self.stepper() as stepper:
            return stepper.result(work)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt.

        Raises:
            RequestError: it is malformed.
        """
        return self._front.input_processor.tokenize(prompt).token_ids

    def has_unfinished_requests(self) -> bool:
        """Return True while :meth:`step` has anything to wait for."""
        return bool(self._own.num_unfinished)

    def step(self) -> list[RequestOutput | PooledOutput]:
        """Wait for the next outputs of what :meth:`add_request` queued; [] at once if that is nothing.

        Raises:
            EngineDead: the engine stopped; all requests are gone.
        """
        every = self._own.wait()
        for update in every:
            self._observe_own(update)
        return [update.output for update in every if update.output is not None]

    @property
    def num_unfinished(self) -> int:
        """Number of requests of which :meth:`step` will return more."""
        return self._own.num_unfinished

    def _observe_own(self, update: RequestUpdate) -> None:
        """Tell the observer of a pooling request that :meth:`add_request` queued."""
        if self._observer is None or not update.finished:
            return
        task, started = self._own_pooling.pop(update.request_id, ("", 0.0))
        if isinstance(update.output, PoolingRequestOutput):
            self._observer.pooled(task, [update.output], started)
        elif task:
            self._observer.pooling_ended("abort" if update.error is None else "error")

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests with finish reason ``abort``; their last outputs come with :meth:`step`.

        Args:
            request_ids: one id or several; unknown ones are ignored.

        Raises:
            RequestError: an id is not text; nothing is aborted.
        """
        self._own.abort(as_request_ids(request_ids))

    def stats(self, *, drain: bool = False) -> EngineStats:
        """Counters and gauges of the core.

        Raises:
            EngineDead: it gave no answer in :data:`~headrace_engine.clients.base.CONTROL_TIMEOUT`.
        """
        return self._front.stats(drain).answer()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """See :meth:`headrace_core.engine.EngineClient.add_lora`."""
        return self._front.add_lora(lora_request).answer()

    def remove_lora(self, lora_int_id: int) -> bool:
        """See :meth:`headrace_core.engine.EngineClient.remove_lora`."""
        return self._front.remove_lora(lora_int_id).answer()

    def list_loras(self) -> list[LoRARequest]:
        """See :meth:`headrace_core.engine.EngineClient.list_loras`."""
        return list(self._front.list_loras().answer())

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False while requests hold some and may not be reset.

        Raises:
            EngineDead: as :meth:`stats`.
        """
        return self._front.reset_prefix_cache(reset_running_requests).answer()

    def shutdown(self) -> None:
        """Stop the core and free everything; calls that still wait raise. Idempotent.

        Raises: as :meth:`check_caller`.
        """
        self.check_caller()
        self._calls.close()
        try:
            self._client.shutdown()
        finally:
            self._front.input_processor.close()

    def check_caller(self) -> None:
        """Check that the calling thread may wait for the engine.

        Raises:
            EngineError: it runs a function of :meth:`collective_rpc` or :meth:`apply_model` for it.
        """
        self._client.check_caller()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        timeout: float | None = None,
    ) -> list[Any]:
        """OfflineCall a method of every worker: results by rank.

        Args:
            method: its name; or a function that gets the worker before ``args``, only where the
                workers run in this process. It runs between two steps: nothing else runs meanwhile.
            timeout: seconds; None: :data:`~headrace_engine.clients.base.PROFILE_TIMEOUT`. What was
                called goes on after it.

        Raises:
            RequestError: a method of that name may not be called.
            UnsupportedFeature: a function, and the workers are in another process.
            EngineError: what was called would have ended a worker (``sys.exit()``), or asked this
                engine for something.
            TimeoutError: there was no answer in time; names the call and the seconds.
        """
        seconds = PROFILE_TIMEOUT if timeout is None else timeout
        return self._front.call_workers(method, args, seconds).answer()

    def apply_model(
        self, function: Callable[[Any], Any], *, timeout: float | None = None
    ) -> list[Any]:
        """Run a function on every worker's model: results by rank.

        Raises:
            UnsupportedFeature: the workers are in another process.
            EngineError: as :meth:`collective_rpc`.
            TimeoutError: no answer in time.
        """
        seconds = PROFILE_TIMEOUT if timeout is None else timeout
        return self._front.apply_model(function, seconds).answer()

    def _next_id(self) -> str:
        return f"offline-{next(self._serial)}"


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


def _check_one_each(prompts: Sequence[Prompt], **given: Sequence[object] | None) -> None:
    """Raises: RequestError, there are more or fewer values of an argument than prompts."""
    for name, values in given.items():
        if values is not None and len(values) != len(prompts):
            raise RequestError(
                f"{name}: {len(values)} values for {len(prompts)} prompts", param=name
            )
