"""All requests that are under way, and the one loop over a step's outputs."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace_core.errors import EngineAsleep, GenerateError, RequestError
from headrace_core.reliability import failpoints
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.messages import CoreOutput, CoreOutputs, TimedStep
from headrace_engine.output_processing import unread_tokens
from headrace_engine.output_processing.detokenizer import own_bytes, token_texts
from headrace_engine.output_processing.output import StreamState
from headrace_engine.output_processing.pooled import PooledState
from headrace_engine.output_processing.unread_tokens import UnreadTokens

logger = logging.getLogger(__name__)


FollowedRequest = StreamState | PooledState
"""A request under way."""


class ProcessedOutputs(NamedTuple):
    """The effect of a step's outputs."""

    changed: list[FollowedRequest]
    """Requests with an update, each once."""
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
        self._by_id: dict[str, FollowedRequest] = {}
        self._by_core_id: dict[str, FollowedRequest] = {}
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._rate = StartRate(clock)
        self._unread = UnreadTokens()
        self._version = ""
        """Version of the weights that computed the unread tokens."""

    @property
    def states(self) -> list[FollowedRequest]:
        """All requests under way, in order of arrival."""
        return list(self._by_id.values())

    @property
    def has_unfinished(self) -> bool:
        """True if any request still runs; others may be here because of consumers that are slow."""
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
        """Estimated seconds until so many completions, or so many prompt tokens, that wait
        now have produced something: from the rate at which others did lately."""
        return self._rate.seconds_until(num_starts, num_tokens)

    def add(self, request: PreparedRequest) -> FollowedRequest:
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
        state: FollowedRequest
        if request.pooling is not None:
            state = PooledState(request)
        else:
            state = StreamState(
                request, self._tokenizer, self._stream_interval, self._text_of, self._bytes_of
            )
        self._by_id[request.request_id] = state
        for core in request.core_requests:
            self._by_core_id[core.request_id] = state
        self._count_waiting(state, state.num_waiting)
        return state

    def get(self, request_id: str) -> FollowedRequest | None:
        """The request under way with the caller's id."""
        return self._by_id.get(request_id)

    def remove(self, state: FollowedRequest) -> list[str]:
        """Follow a request no longer; later outputs of it are ignored. Idempotent.

        Returns:
            Core requests that still run and must be aborted.
        """
        if self._by_id.get(state.request.request_id) is not state:
            return []
        del self._by_id[state.request.request_id]
        if isinstance(state, StreamState):
            state.read_unread(last=True)
        self._count_waiting(state, -state.num_waiting)
        for core in state.request.core_requests:
            self._by_core_id.pop(core.request_id, None)
        return state.unfinished_core_ids

    def process(self, step: CoreOutputs) -> ProcessedOutputs:
        """Take in one step's outputs."""
        changed: dict[int, FollowedRequest] = {}  # by identity: completions of one come together
        aborts: list[str] = []
        find, timestamp, version = self._by_core_id.get, step.timestamp, step.weights_version
        earlier = step.earlier_versions or {}
        if step.timed is not None:
            self._count_step(step.timed)
        outputs = step.outputs
        if step.tokens:
            if earlier or failpoints.PLAN is not None:
                outputs = [*outputs, *(CoreOutput(i, [one]) for i, one in step.tokens.items())]
            else:
                aborts += self._take_tokens(step, changed)
        for output in outputs:
            state = find(output.request_id)
            if state is None:
                continue  # its consumer has gone; the core was told so
            waiting = state.num_waiting
            try:
                if failpoints.PLAN is not None:
                    failpoints.hit("output.update", output.request_id)
                if earlier:
                    for before in earlier.get(output.request_id, ()):
                        state.weights_versions.see(before)
                if state.update(output, timestamp, version):
                    aborts.append(output.request_id)
                failed = output.finish_reason == "error" and output.dead_end is None
                if failed and state.error is None:
                    aborts += self._fail(
                        state, output.error or "", asleep=output.asleep, ended=output.engine_ended
                    )
            except Exception as error:
                logger.exception("request %s ends", output.request_id)
                aborts += self._fail(state, f"{type(error).__name__}: {error}")
            if waiting != state.num_waiting:
                self._count_started(state, waiting - state.num_waiting)
            changed[id(state)] = state
        return ProcessedOutputs(list(changed.values()), aborts)

    def _take_tokens(self, step: CoreOutputs, changed: dict[int, FollowedRequest]) -> list[str]:
        """Take in the tokens of requests that merely go on; returns what to abort."""
        find, timestamp, version = self._by_core_id.get, step.timestamp, step.weights_version
        aborts: list[str] = []
        if version != self._version:  # each notes the new one
            self._unread.remove_all()
            self._version = version
        tokens = step.tokens
        for core_id in self._unread.put_aside(tokens, timestamp):
            token_id, state = tokens[core_id], find(core_id)
            if state is None:
                continue
            assert type(state) is StreamState
            if state.is_plain and version in state.weights_versions.all:
                state.add_plain(token_id, timestamp)
                if state.tells_end_only:
                    if len(self._by_core_id) >= unread_tokens.FEWEST_REQUESTS:
                        state.read_later(self._unread, core_id)
                    continue
            else:
                aborts += self._take_token(state, core_id, token_id, step)
            changed[id(state)] = state
        return aborts

    def _take_token(
        self, state: StreamState, core_id: str, token_id: int, step: CoreOutputs
    ) -> list[str]:
        """Take in a token that is looked at; returns what to abort."""
        try:
            ended = state.add_token(core_id, token_id, step.timestamp, step.weights_version)
            return [core_id] if ended else []
        except Exception as error:
            logger.exception("request %s ends", core_id)
            return self._fail(state, f"{type(error).__name__}: {error}")

    def end(self, request_ids: Sequence[str], finish_reason: str) -> ProcessedOutputs:
        """End requests from outside, at once; unknown ids are ignored."""
        states = [self._by_id[i] for i in request_ids if i in self._by_id]
        aborts = [core_id for state in states for core_id in state.unfinished_core_ids]
        for state in states:
            self._count_waiting(state, -state.num_waiting)
            state.end(finish_reason)
        return ProcessedOutputs(states, aborts)

    def _fail(
        self, state: FollowedRequest, message: str, *, asleep: bool = False, ended: bool = False
    ) -> list[str]:
        """One completion failed, and with it the request; returns what to abort."""
        failed = GenerateError(f"request {state.request.request_id!r} failed: {message}")
        failed.is_public = ended
        state.error = EngineAsleep(message) if asleep else failed
        aborts = state.unfinished_core_ids
        state.end("error")
        return aborts

    def _count_step(self, step: TimedStep) -> None:
        """Count a step once for each request, however many of its completions were part of it."""
        for state in {self._by_core_id.get(core_id) for core_id in step.request_ids}:
            if state is not None:
                state.add_step(step.times)

    def _count_started(self, state: FollowedRequest, number: int) -> None:
        self._count_waiting(state, -number)
        self._rate.record(number, number * len(state.request.prompt_token_ids))

    def _count_waiting(self, state: FollowedRequest, number: int) -> None:
        self._num_waiting += number
        self._num_waiting_tokens += number * len(state.request.prompt_token_ids)


KEPT_STARTS = 256
"""Starts over which the rate is measured."""
PAUSE = 30.0
"""Seconds without a start after which the starts before are forgotten."""
UNKNOWN = 1.0
"""Seconds to wait where nothing was measured."""


class StartRate:
    """Completions that produced their first token, and the prompt tokens behind them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._starts: deque[tuple[float, int, int]] = deque(maxlen=KEPT_STARTS)
        """Time, completions, prompt tokens."""

    def record(self, num_starts: int, num_tokens: int) -> None:
        """So many completions produced something for the first time."""
        now = self._clock()
        if self._starts and now - self._starts[-1][0] > PAUSE:
            self._starts.clear()
        self._starts.append((now, num_starts, num_tokens))

    def seconds_until(self, num_starts: int = 0, num_tokens: int = 0) -> float:
        """Seconds that so many starts, or starts with so many prompt tokens, take: the longer time.

        Counted up to now, so that a queue that has stopped moving looks slow.
        """
        if len(self._starts) < 2:
            return UNKNOWN
        # What came with the first one began before it.
        seconds = max(self._clock() - self._starts[0][0], 1e-3)
        _, *later = self._starts
        starts = sum(number for _, number, _ in later)
        tokens = sum(number for _, _, number in later)
        return max(num_starts * seconds / max(1, starts), num_tokens * seconds / max(1, tokens))
