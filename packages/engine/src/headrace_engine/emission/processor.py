"""All requests that are under way, and the one loop over a step's outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace_core import failpoints
from headrace_core.errors import GenerateError, RequestError
from headrace_core.text import Tokenizer
from headrace_engine.emission.detokenizer import own_bytes, token_texts
from headrace_engine.emission.output import RequestState
from headrace_engine.emission.pooled import PooledState
from headrace_engine.emission.rate import StartRate
from headrace_engine.intake.prepared import PreparedRequest
from headrace_engine.messages import CoreOutputs, TimedStep

logger = logging.getLogger(__name__)


Followed = RequestState | PooledState
"""A request under way."""


class Processed(NamedTuple):
    """What a step's outputs came to."""

    changed: list[Followed]
    """Requests with news, each once."""
    abort_core_ids: list[str]
    """Completions that ended here while the core still runs them."""


class OutputProcessor:
    """Sorts a core's outputs into the requests that they belong to. Used from one thread.

    Args:
        tokenizer: None: outputs have no text.
        stream_interval: tokens per streamed output.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stream_interval: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._text_of = token_texts(tokenizer) if tokenizer is not None else None
        self._bytes_of = own_bytes(tokenizer) if tokenizer is not None else None
        self._stream_interval = stream_interval
        self._clock = clock
        self._by_id: dict[str, Followed] = {}
        self._by_core_id: dict[str, Followed] = {}
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._rate = StartRate(clock)

    @property
    def states(self) -> list[Followed]:
        """All requests under way, in order of arrival."""
        return list(self._by_id.values())

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still runs; others may be here because of consumers that are slow."""
        return any(not state.finished for state in self._by_id.values())

    @property
    def num_waiting(self) -> int:
        """Completions that have not produced anything yet."""
        return self._num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._num_waiting_tokens

    def seconds_until(self, num_starts: int = 0, num_tokens: int = 0) -> float:
        """How long it should take until so many completions, or so many prompt tokens, that wait
        now have produced something: from the rate at which others did lately."""
        return self._rate.seconds_until(num_starts, num_tokens)

    def add(self, request: PreparedRequest) -> Followed:
        """Follow a request from now on.

        Raises:
            RequestError: a request of that id is under way.
        """
        if request.request_id in self._by_id:
            raise RequestError(
                f"request_id = {request.request_id!r}: a request of that id is under way",
                param="request_id",
                value=request.request_id,
            )
        state: Followed
        if request.pooling is not None:
            state = PooledState(request)
        else:
            state = RequestState(
                request, self._tokenizer, self._stream_interval, self._text_of, self._bytes_of
            )
        self._by_id[request.request_id] = state
        for core in request.core_requests:
            self._by_core_id[core.request_id] = state
        self._count_waiting(state, state.num_waiting)
        return state

    def get(self, request_id: str) -> Followed | None:
        """The request under way with the caller's id."""
        return self._by_id.get(request_id)

    def remove(self, state: Followed) -> list[str]:
        """Follow a request no longer; later outputs of it are ignored. Idempotent.

        Returns:
            Core requests that still run and must be aborted.
        """
        if self._by_id.get(state.request.request_id) is not state:
            return []
        del self._by_id[state.request.request_id]
        self._count_waiting(state, -state.num_waiting)
        for core in state.request.core_requests:
            self._by_core_id.pop(core.request_id, None)
        return state.unfinished_core_ids

    def process(self, step: CoreOutputs) -> Processed:
        """Take in one step's outputs."""
        changed: dict[int, Followed] = {}  # by identity: completions of one come together
        aborts: list[str] = []
        find, timestamp = self._by_core_id.get, step.timestamp
        if step.timed is not None:
            self._count_step(step.timed)
        for output in step.outputs:
            state = find(output.request_id)
            if state is None:
                continue  # its consumer has gone; the core was told so
            waiting = state.num_waiting
            try:
                if failpoints.PLAN is not None:
                    failpoints.hit("emission.update", output.request_id)
                if state.update(output, timestamp):
                    aborts.append(output.request_id)
                failed = output.finish_reason == "error" and output.dead_end is None
                if failed and state.error is None:
                    aborts += self._fail(state, output.error or "")
            except Exception as error:
                logger.exception("request %s ends", output.request_id)
                aborts += self._fail(state, f"{type(error).__name__}: {error}")
            if waiting != state.num_waiting:
                self._count_started(state, waiting - state.num_waiting)
            changed[id(state)] = state
        return Processed(list(changed.values()), aborts)

    def end(self, request_ids: Sequence[str], finish_reason: str) -> Processed:
        """End requests from outside, at once; unknown ids are ignored."""
        states = [self._by_id[i] for i in request_ids if i in self._by_id]
        aborts = [core_id for state in states for core_id in state.unfinished_core_ids]
        for state in states:
            self._count_waiting(state, -state.num_waiting)
            state.end(finish_reason)
        return Processed(states, aborts)

    def _fail(self, state: Followed, message: str) -> list[str]:
        """One completion failed, and with it the request; returns what to abort."""
        state.error = GenerateError(f"request {state.request.request_id!r} failed: {message}")
        aborts = state.unfinished_core_ids
        state.end("error")
        return aborts

    def _count_step(self, step: TimedStep) -> None:
        """Once for each request, however many of its completions were part of the step."""
        for state in {self._by_core_id.get(core_id) for core_id in step.request_ids}:
            if state is not None:
                state.add_step(step.times)

    def _count_started(self, state: Followed, number: int) -> None:
        self._count_waiting(state, -number)
        self._rate.record(number, number * len(state.request.prompt_token_ids))

    def _count_waiting(self, state: Followed, number: int) -> None:
        self._num_waiting += number
        self._num_waiting_tokens += number * len(state.request.prompt_token_ids)
