"""The synchronous engine, for scripts: intake in front of a core, emission behind it.

A calling thread takes each step's outputs from a queue itself, so no event loop and no task switch
comes between two tokens (:mod:`headrace_engine.calls`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from headrace_core.engine import EngineStats, ServedModel
from headrace_core.errors import EngineDead, GenerateError, RequestError, UnsupportedFeature
from headrace_core.output import PoolingRequestOutput, RequestOutput
from headrace_core.packed import PackedArray
from headrace_core.pooling import PoolingParams
from headrace_core.request import Prompt
from headrace_core.sampling import RequestOutputKind, SamplingParams
from headrace_core.scoring import ScoreInput
from headrace_core.text import Tokenizer
from headrace_engine.calls import Call, Calls, News, RequestObserver
from headrace_engine.clients.base import CONTROL_TIMEOUT, PROFILE_TIMEOUT, CoreClient, no_answer
from headrace_engine.clients.sink import WeakSink
from headrace_engine.emission.pooled import PooledOutput
from headrace_engine.guests import name_of
from headrace_engine.intake.intake import Intake
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.pooling.jobs import Gathering, Job, read_job, requests_of
from headrace_engine.pooling.scores import Scored

FED_AT_ONCE = 1024
"""Pooling requests of one call that are under way together; the others are read meanwhile."""

Result = TypeVar("Result")


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


class Batch:
    """Requests that were started together and end as one list of outputs. Leaving the ``with`` block
    aborts the requests that still run. Belongs to one thread at a time.

    Args:
        call: holds the requests.
        requests: their parameters by request id, in order.
    """

    def __init__(self, call: Call, requests: dict[str, SamplingParams]) -> None:
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

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OfflineEngine:
    """The synchronous engine. Thread-safe: calls of several threads run together, in the same steps.

    The constructor starts the core and waits until it is ready.

    Args:
        client: not yet started.
        intake: knows tokenizer and model.
        observer: follows all requests; None: nobody does.

    Raises:
        HeadraceError: whatever kept the core from starting.
    """

    def __init__(
        self, client: CoreClient, intake: Intake, observer: EngineObserver | None = None
    ) -> None:
        self._client = client
        self._intake = intake
        self._observer = observer
        self._calls = Calls(client, intake.tokenizer, observer)
        self._own = self._calls.open()
        self._own_pooling: dict[str, tuple[str, float]] = {}
        """Pooling requests of :meth:`add_request`: id -> (task, when it came); only for an observer."""
        self._serial = itertools.count(1)  # next() is atomic
        client.start(WeakSink(self._calls))
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
            One final, cumulative output per prompt, in order. A completion that failed inside the
            engine has finish reason ``error``, and its ``error`` says why.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing is left running.
            EngineDead: the engine stopped.
            KeyboardInterrupt: everything that was pending has been aborted.
        """
        with self.start(
            prompts, params, priority=priority, add_special_tokens=add_special_tokens
        ) as batch:
            return batch.wait(on_output)

    def start(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        priority: Sequence[int] | None = None,
        add_special_tokens: bool | None = None,
        on_added: Callable[[], None] | None = None,
    ) -> Batch:
        """Queue requests and return at once; :meth:`Batch.wait` returns their outputs.

        Args:
            prompts, params, priority, add_special_tokens: as :meth:`run`.
            on_added: called after each request was queued.

        Raises:
            RequestError: a prompt or its parameters are wrong; nothing is left running.
            EngineDead: the engine stopped.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        for name, values in (("params", every), ("priority", priority)):
            if values is not None and len(values) != len(prompts):
                raise RequestError(
                    f"{name}: {len(values)} values for {len(prompts)} prompts", param=name
                )
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
                    call=call,
                )
                requests[request_id] = every[index]
                if on_added is not None:
                    on_added()
            undo.pop_all()
        return Batch(call, requests)

    def open_call(self) -> Call:
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
        call: Call | None = None,
    ) -> None:
        """Queue one request; :meth:`step` returns its outputs.

        Args:
            call: of :meth:`open_call`, which returns them instead.
            params: of pooling, with a ``task``: the request has one output, a
                :class:`~headrace_core.output.PoolingRequestOutput`.

        Raises:
            RequestError: the prompt or its parameters are wrong, or the id is in use.
            EngineDead: the engine stopped.
        """
        started = time.monotonic()
        request = self._prepared(request_id, prompt, params, priority, add_special_tokens)
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
    ) -> PreparedRequest:
        if isinstance(params, PoolingParams):
            if params.task is None:
                tasks = ", ".join(self.model.tasks)
                raise RequestError(
                    f"task = None: must be one of those that the model has: {tasks}", param="task"
                )
            return self._pooling_request(
                Job(prompt, params, params.task, request_id, priority, add_special_tokens)
            )
        return self._intake.prepare(
            prompt,
            params,
            request_id,
            priority=priority,
            add_special_tokens=add_special_tokens,
            clamp_max_tokens=True,
        )

    def _pooling_request(self, job: Job) -> PreparedRequest:
        prompt = read_job(self._intake.pooling, job)
        if prompt.window:
            raise UnsupportedFeature(
                f"prompt: {len(prompt.token_ids)} tokens are several windows; `encode` computes them",
                param="prompt",
            )
        return self._intake.pooling.request(prompt)

    def encode(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams],
        *,
        task: str,
        priority: Sequence[int] | None = None,
        add_special_tokens: bool | None = None,
        on_output: Callable[[int, PooledOutput], None] | None = None,
    ) -> list[PooledOutput]:
        """Pool prompts.

        Args:
            params: one for all, or one per prompt; not changed.
            task: see :meth:`headrace_core.engine.EngineClient.encode`.
            on_output: called with (index of the prompt, result) as results become ready. Must not
                raise.

        Returns:
            One result per prompt, in order; ``outputs.data`` is a
            :class:`~headrace_core.packed.PackedArray`.

        Raises:
            UnsupportedFeature, RequestError: as :meth:`headrace_core.engine.EngineClient.encode`;
                nothing is left running.
            GenerateError: a prompt failed.
            EngineDead: the engine stopped.
        """
        every = [params] * len(prompts) if isinstance(params, PoolingParams) else list(params)
        for name, values in (("pooling_params", every), ("priority", priority)):
            if values is not None and len(values) != len(prompts):
                raise RequestError(
                    f"{name}: {len(values)} values for {len(prompts)} prompts", param=name
                )
        jobs = [
            Job(
                prompt,
                every[index],
                task,
                self._next_id(),
                priority[index] if priority is not None else 0,
                add_special_tokens,
            )
            for index, prompt in enumerate(prompts)
        ]
        return self._pool(jobs, on_output, observed_as=task)

    def score(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams,
        *,
        chat_template: str | None = None,
        add_special_tokens: bool | None = None,
        on_output: Callable[[int, PooledOutput], None] | None = None,
    ) -> list[Scored]:
        """Score pairs; see :meth:`headrace_core.engine.EngineClient.score`.

        Args:
            add_special_tokens: see :meth:`headrace_engine.pooling.scores.ScorePlanner.plan`.
            on_output: called with (index, result) for each prompt that is pooled for them.
        """
        started = time.monotonic()
        plan = self._intake.scores.plan(
            data_1, data_2, params, self._next_id(),
            chat_template=chat_template, add_special_tokens=add_special_tokens,
        )  # fmt: skip
        scored = plan.outputs(self._pool(plan.jobs, on_output))
        if self._observer is not None:
            self._observer.pooled("score", scored, started)
        return scored

    def align(self, prompts: Sequence[Prompt]) -> list[PackedArray]:
        """Which part of its media each token of a sequence comes from; see
        :meth:`headrace_core.engine.EngineClient.align`.

        Raises: as :meth:`encode`.
        """
        pending: dict[str, int] = {}
        found: dict[int, PackedArray] = {}
        with self._calls.open() as call:
            for index, prompt in enumerate(prompts):
                request = self._intake.alignment.prepare(prompt, self._next_id())
                call.add(request)
                pending[request.request_id] = index
            while call.num_unfinished:
                for news in call.wait():
                    found[pending[news.request_id]] = _pooled(news).outputs.data
        return [found[index] for index in range(len(prompts))]

    def _pool(
        self,
        jobs: Sequence[Job],
        on_output: Callable[[int, PooledOutput], None] | None,
        observed_as: str | None = None,
    ) -> list[PooledOutput]:
        """Results of prompts, in order. New ones are read while others run.

        Args:
            observed_as: the task under which the observer is told of each result; None: it is not.
        """
        started = time.monotonic()
        feed = self._feed(jobs)
        pending: dict[str, tuple[int, int, Gathering]] = {}
        results: dict[int, PooledOutput] = {}
        with self._calls.open() as call:
            while True:
                for request, place in itertools.islice(feed, FED_AT_ONCE - call.num_unfinished):
                    call.add(request)
                    pending[request.request_id] = place
                if not call.num_unfinished:
                    return [results[index] for index in range(len(jobs))]
                for news in call.wait():
                    index, part, gathering = pending.pop(news.request_id)
                    if self._observer is not None and news.output is None:
                        self._observer.pooling_ended("abort" if news.error is None else "error")
                    gathering.add(part, _pooled(news))
                    if gathering.complete:
                        result = results[index] = gathering.output()
                        if self._observer is not None and observed_as is not None:
                            self._observer.pooled(observed_as, [result], started)
                        if on_output is not None:
                            on_output(index, result)

    def _feed(
        self, jobs: Sequence[Job]
    ) -> Iterator[tuple[PreparedRequest, tuple[int, int, Gathering]]]:
        """Requests of the jobs: (job, part of it, where its results go)."""
        intake = self._intake.pooling
        for index, job in enumerate(jobs):
            prompt = read_job(intake, job)
            gathering = Gathering(prompt)
            for part, request in enumerate(requests_of(intake, prompt)):
                yield request, (index, part, gathering)

    def has_unfinished_requests(self) -> bool:
        """Return True while :meth:`step` has anything to wait for."""
        return bool(self._own.num_unfinished)

    def step(self) -> list[RequestOutput | PooledOutput]:
        """Wait for the next outputs of what :meth:`add_request` queued; [] at once if that is nothing.

        Raises:
            EngineDead: the engine stopped; all requests are gone.
        """
        every = self._own.wait()
        for news in every:
            self._observe_own(news)
        return [news.output for news in every if news.output is not None]

    @property
    def num_unfinished(self) -> int:
        """Number of requests of which :meth:`step` will return more."""
        return self._own.num_unfinished

    def _observe_own(self, news: News) -> None:
        """Tell the observer of a pooling request that :meth:`add_request` queued."""
        if self._observer is None or not news.finished:
            return
        task, started = self._own_pooling.pop(news.request_id, ("", 0.0))
        if isinstance(news.output, PoolingRequestOutput):
            self._observer.pooled(task, [news.output], started)
        elif task:
            self._observer.pooling_ended("abort" if news.error is None else "error")

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """End requests with finish reason ``abort``; their last outputs come with :meth:`step`."""
        self._own.abort(request_ids)

    def stats(self, *, drain: bool = False) -> EngineStats:
        """Counters and gauges of the core.

        Raises:
            EngineDead: it gave no answer in :data:`~headrace_engine.clients.base.CONTROL_TIMEOUT`.
        """
        return _of_core(self._client.stats(drain))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False while requests hold some and may not be reset.

        Raises:
            EngineDead: as :meth:`stats`.
        """
        return _of_core(self._client.reset_prefix_cache(reset_running_requests))

    def shutdown(self) -> None:
        """Stop the core and free everything; calls that still wait raise. Idempotent.

        Raises: as :meth:`check_caller`.
        """
        self.check_caller()
        self._calls.close()
        try:
            self._client.shutdown()
        finally:
            self._intake.close()

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
        """Call a method of every worker: results by rank.

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
        if isinstance(method, str):
            name = method
            future = self._client.call_workers(method, args)
        elif callable(method):
            name = name_of(method)
            future = self._client.run_on_workers(method, args)
        else:
            raise RequestError(
                f"method = {method!r:.100}: must be the name of a worker method, or a function",
                param="method",
            )
        return _of_workers(f"collective_rpc: {name}", future, timeout)

    def apply_model(
        self, function: Callable[[Any], Any], *, timeout: float | None = None
    ) -> list[Any]:
        """Run a function on every worker's model: results by rank.

        Raises:
            UnsupportedFeature: the workers are in another process.
            EngineError: as :meth:`collective_rpc`.
            TimeoutError: no answer in time.
        """
        called = self._client.apply_model(function)
        return _of_workers(f"apply_model: {name_of(function)}", called, timeout)

    def _next_id(self) -> str:
        return f"offline-{next(self._serial)}"


def _of_core(called: Future[Result]) -> Result:
    """The core's answer to a control call.

    Raises:
        EngineDead: there was none in time.
    """
    try:
        return called.result(CONTROL_TIMEOUT)
    except TimeoutError:
        if called.done():
            return called.result(0)  # its own error
        raise EngineDead(f"the engine gave no answer in {CONTROL_TIMEOUT:g} s") from None


def _of_workers(call: str, called: Future[Result], timeout: float | None) -> Result:
    """The answer of workers.

    Args:
        call: for the error (:func:`~headrace_engine.clients.base.no_answer`).
        timeout: seconds; None: :data:`PROFILE_TIMEOUT`.

    Raises:
        TimeoutError: there was none in time.
    """
    seconds = PROFILE_TIMEOUT if timeout is None else timeout
    try:
        return called.result(seconds)
    except TimeoutError:
        if called.done():  # it is of what was called, or the answer has come now
            return called.result(0)
        raise no_answer(call, seconds) from None


def _pooled(news: News) -> PooledOutput:
    """The result of a pooling request that has ended.

    Raises:
        GenerateError: there is none.
    """
    if isinstance(news.output, PoolingRequestOutput):
        return news.output
    raise news.error or GenerateError(f"request {news.request_id!r} was aborted")


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
