"""The synchronous engine, for scripts: intake in front of a core, emission behind it.

The calling thread takes each step's outputs from a queue itself, so no event loop and no task switch
stands between two tokens.
"""

from __future__ import annotations

import copy
import itertools
import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace_core.engine import EngineStats, ServedModel
from headrace_core.errors import GenerateError, RequestError, UnsupportedFeature
from headrace_core.output import PoolingRequestOutput, RequestOutput
from headrace_core.packed import PackedArray
from headrace_core.pooling import PoolingParams
from headrace_core.request import Prompt
from headrace_core.sampling import RequestOutputKind, SamplingParams
from headrace_core.scoring import ScoreInput
from headrace_core.text import Tokenizer
from headrace_engine.clients.base import CONTROL_TIMEOUT, PROFILE_TIMEOUT, CoreClient
from headrace_engine.clients.sink import WeakSink, dead_again
from headrace_engine.emission.pooled import PooledOutput
from headrace_engine.emission.processor import Followed, OutputProcessor
from headrace_engine.intake.intake import Intake
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.messages import CoreOutputs
from headrace_engine.pooling.jobs import Gathering, Job, read_job, requests_of
from headrace_engine.pooling.scores import Scored

logger = logging.getLogger(__name__)

FED_AT_ONCE = 1024
"""Pooling requests of one call that are under way together; the others are read meanwhile."""
RECEIVE_WAIT = 1.0
"""Seconds after which a waiting :class:`OfflineEngine` looks whether the core still lives."""


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
        self._aborted: list[Followed] = []
        self._serial = 0
        client.start(WeakSink(self))
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
                    if index < 0 or not isinstance(output, RequestOutput):
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
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
    ) -> None:
        """Queue one request; :meth:`step` returns its outputs.

        Args:
            params: of pooling, with a ``task``: the request has one output, a
                :class:`~headrace_core.output.PoolingRequestOutput`.

        Raises:
            RequestError: the prompt or its parameters are wrong, or the id is in use.
            EngineDead: the engine stopped.
        """
        if isinstance(params, PoolingParams):
            if params.task is None:
                tasks = ", ".join(self.model.tasks)
                raise RequestError(
                    f"task = None: must be one of those that the model has: {tasks}", param="task"
                )
            job = Job(prompt, params, params.task, request_id, priority, add_special_tokens)
            self._add(self._pooling_request(job))
            return
        self._add(
            self._intake.prepare(
                prompt,
                params,
                request_id,
                priority=priority,
                add_special_tokens=add_special_tokens,
                clamp_max_tokens=True,
            )
        )

    def _pooling_request(self, job: Job) -> PreparedRequest:
        prompt = read_job(self._intake.pooling, job)
        if prompt.window:
            raise UnsupportedFeature(
                f"prompt: {len(prompt.token_ids)} tokens are several windows; `encode` computes them",
                param="prompt",
            )
        return self._intake.pooling.request(prompt)

    def _add(self, request: PreparedRequest) -> None:
        state = self._processor.add(request)
        try:
            self._client.add(request.core_requests)
        except BaseException:
            self._processor.remove(state)
            raise

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
        return self._pool(jobs, on_output)

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
        plan = self._intake.scores.plan(
            data_1, data_2, params, self._next_id(),
            chat_template=chat_template, add_special_tokens=add_special_tokens,
        )  # fmt: skip
        return plan.outputs(self._pool(plan.jobs, on_output))

    def align(self, prompts: Sequence[Prompt]) -> list[PackedArray]:
        """Which part of its media each token of a sequence comes from; see
        :meth:`headrace_core.engine.EngineClient.align`.

        Raises: as :meth:`encode`.
        """
        pending: dict[str, int] = {}
        found: dict[int, PackedArray] = {}
        try:
            for index, prompt in enumerate(prompts):
                request = self._intake.alignment.prepare(prompt, self._next_id())
                self._add(request)
                pending[request.request_id] = index
            while pending:
                for state in self._advance():
                    request_id = state.request.request_id
                    if state.finished and request_id in pending:
                        found[pending.pop(request_id)] = _pooled(state).outputs.data
        except BaseException:
            self._drop(list(pending))
            raise
        return [found[index] for index in range(len(prompts))]

    def _pool(
        self, jobs: Sequence[Job], on_output: Callable[[int, PooledOutput], None] | None
    ) -> list[PooledOutput]:
        """Results of prompts, in order. New ones are read while others run."""
        feed = self._feed(jobs)
        pending: dict[str, tuple[int, int, Gathering]] = {}
        results: dict[int, PooledOutput] = {}
        try:
            while True:
                for request, place in itertools.islice(feed, FED_AT_ONCE - len(pending)):
                    self._add(request)
                    pending[request.request_id] = place
                if not pending:
                    return [results[index] for index in range(len(jobs))]
                for state in self._advance():
                    request_id = state.request.request_id
                    if not state.finished or request_id not in pending:
                        continue
                    index, part, gathering = pending.pop(request_id)
                    gathering.add(part, _pooled(state))
                    if gathering.complete:
                        results[index] = gathering.output()
                        if on_output is not None:
                            on_output(index, results[index])
        except BaseException:
            self._drop(list(pending))
            raise

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
        """Whether :meth:`step` has anything to wait for."""
        return bool(self._processor.states)

    def step(self) -> list[RequestOutput | PooledOutput]:
        """Wait for the next outputs; [] at once if nothing is under way.

        Raises:
            EngineDead: the engine stopped; all requests are gone.
        """
        outputs = (state.take() for state in self._advance())
        return [output for output in outputs if output is not None]

    def _advance(self) -> list[Followed]:
        """Wait for news; whose last has come is followed no longer."""
        if not self.has_unfinished_requests():
            return []
        changed, self._aborted = self._aborted, []
        if not changed:
            processed = self._processor.process(self._receive())
            if processed.abort_core_ids:
                self._client.abort(processed.abort_core_ids)
            changed = processed.changed
        for state in changed:
            if state.finished:
                self._processor.remove(state)
                if state.error is not None:
                    logger.error("%s", state.error)
        return changed

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
        try:
            self._client.shutdown()
        finally:
            self._intake.close()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def collective_rpc(
        self, method: str, *, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """As :meth:`headrace_core.engine.EngineClient.collective_rpc`; without a timeout it waits
        :data:`~headrace_engine.clients.base.PROFILE_TIMEOUT`."""
        if not isinstance(method, str):
            raise RequestError(
                f"method = {method!r}: must be a name; functions are not called", param="method"
            )
        return self._client.call_workers(method, args).result(
            PROFILE_TIMEOUT if timeout is None else timeout
        )

    def apply_model(
        self, function: Callable[[Any], Any], *, timeout: float | None = None
    ) -> list[Any]:
        """Run a function on every worker's model: results by rank.

        Raises:
            UnsupportedFeature: the workers are in another process.
            TimeoutError: no answer in time.
        """
        return self._client.apply_model(function).result(
            PROFILE_TIMEOUT if timeout is None else timeout
        )

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
            raise dead_again(received)

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


def _pooled(state: Followed) -> PooledOutput:
    """The result of a pooling request that has ended.

    Raises:
        GenerateError: there is none.
    """
    output = state.take()
    if isinstance(output, PoolingRequestOutput):
        return output
    raise state.error or GenerateError(f"request {state.request.request_id!r} was aborted")


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
