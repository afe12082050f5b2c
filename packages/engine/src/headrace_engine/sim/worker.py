"""The worker without a model: it keeps the books that a real one keeps, and checks them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import Any

from headrace_core.errors import UnsupportedFeature
from headrace_core.executor import MemoryProfile
from headrace_core.kv import CacheSpec, FullAttentionSpec, KVCacheConfig
from headrace_core.reliability import failpoints
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import (
    NewRequest,
    RequestStepResult,
    ScheduledStep,
    StepResult,
    TokenLogprobs,
)
from headrace_engine.sim.rows import RequestRows
from headrace_engine.sim.tokens import seed_of, simulated_token

IMPOSSIBLE = -9999.0
"""Log-probability of every token but the one that is certain."""
NOT_FINITE = "the model's logits are not finite"


class _SimRequest:
    """A request in the worker's memory."""

    __slots__ = (
        "bad_words", "error", "num_blocks", "num_computed", "num_prompt", "params", "seed",
        "stops", "token_ids",
    )  # fmt: skip

    def __init__(self, new: NewRequest) -> None:
        self.params: SamplingParams = new.request.params
        self.token_ids = list(new.token_ids)
        self.num_prompt = new.num_prompt_tokens
        self.num_computed = new.num_computed_tokens
        self.num_blocks = len(new.block_ids[0])
        self.stops = new.request.stop_token_ids
        self.bad_words = new.request.bad_words_token_ids
        seed = new.request.params.seed
        self.seed = seed_of(self.token_ids[: self.num_prompt]) if seed is None else seed
        self.error: str | None = None


class SimWorker:
    """Implements :class:`headrace_core.executor.Worker` without a model and without torch.

    Its "model" is certain of one token at each position (:mod:`headrace_engine.sim.tokens`), so
    temperature, penalties and cut-offs change nothing; what forbids tokens (stop tokens before
    ``min_tokens``, ``allowed_token_ids``, ``bad_words``) is honoured. It never ends an output by
    itself. A step takes ``step_seconds`` and ``token_seconds`` for each token.

    What the scheduler says is checked: a request has blocks for every token that it computes, and
    comes back from a preemption with the tokens that it had.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        block_size: int,
        max_num_batched_tokens: int,
        available_memory: int,
        seed: int = 0,
        step_seconds: float = 0.0,
        token_seconds: float = 0.0,
    ) -> None:
        self._vocab_size = vocab_size
        self._ends = frozenset(eos_token_ids)
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._available_memory = available_memory
        self._seed = seed
        self._step_seconds = step_seconds
        self._token_seconds = token_seconds
        self._held: dict[str, _SimRequest] = {}
        """Those of which each step needs a look of its own."""
        self._rows = RequestRows(seed, vocab_size, self._ends, block_size)
        """All others."""
        self._failed: dict[str, str] = {}
        """By request in a row: what went wrong with it."""
        self._launching: Callable[[], None] = lambda: None

    def load(self) -> None:
        """There is nothing to load."""

    def kv_specs(self) -> dict[str, CacheSpec]:
        """One layer of one byte: real blocks, next to no memory."""
        return {"sim": FullAttentionSpec(self._block_size, 1, 1, "int8")}

    def profile(self) -> MemoryProfile:
        """No weights and no activations."""
        longest = self._step_seconds + self._token_seconds * self._max_num_batched_tokens
        return MemoryProfile(0, 0, self._available_memory, longest)

    def allocate_cache(self, config: KVCacheConfig) -> None:
        """Nothing is stored."""

    def warm_up(self) -> None:
        """There is nothing to warm up."""

    def when_launching(self, call: Callable[[], None]) -> None:
        """See :meth:`headrace_core.executor.Worker.when_launching`."""
        self._launching = call

    rank = 0
    """Its place among the workers."""
    device = "sim"

    def get_model(self) -> Any:
        """Raise UnsupportedFeature: a simulated device has no model."""
        raise UnsupportedFeature("device 'sim' has no model")

    def report(self) -> dict[str, Any]:
        """Facts about this worker."""
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "device": self.device,
            "num_requests": len(self._held) + len(self._rows),
        }

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        """Raise UnsupportedFeature: a simulated device has no model."""
        raise UnsupportedFeature("device 'sim' has no model to apply a function to")

    def start_profile(self) -> None:
        """Refused: there is nothing to record."""
        raise UnsupportedFeature("device 'sim' computes nothing that a profile could show")

    def stop_profile(self) -> None:
        """Refused, as :meth:`start_profile`."""
        self.start_profile()

    def update_config(self, changes: object) -> None:
        """Refused: there is nothing to load."""
        raise UnsupportedFeature("device 'sim' has no weights to read")

    def reload_weights(self) -> None:
        """Refused, as :meth:`update_config`."""
        self.update_config(None)

    def stage_weights(self, message: object) -> int:
        """Refused, as :meth:`update_config`."""
        raise UnsupportedFeature("device 'sim' has no weights to update")

    def drop_weights(self) -> None:
        """Nothing has come."""

    def refuse_weights(self) -> None:
        """Nothing has come."""

    def held_weights(self) -> tuple[int, int]:
        """None have come."""
        return 0, 0

    def init_weight_update_group(self, *arguments: object) -> None:
        """Refused, as :meth:`update_config`."""
        self.stage_weights(arguments)

    def open_weight_stream(self) -> None:
        """Refused, as :meth:`update_config`."""
        self.stage_weights(None)

    def close_weight_transfer(self) -> None:
        """Refused, as :meth:`update_config`."""
        self.stage_weights(None)

    def close(self) -> None:
        """Forget all requests."""
        self._held.clear()
        self._rows = RequestRows(self._seed, self._vocab_size, self._ends, self._block_size)

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step.

        Raises:
            RuntimeError: the scheduler broke a promise.
        """
        _pass("engine.step.prepare", step)
        self._take_changes(step)
        self._launching()
        begin = time.perf_counter()
        _pass("engine.step.forward", step)
        seconds = self._step_seconds + self._token_seconds * step.num_tokens
        if seconds:
            time.sleep(seconds)
        result = StepResult(step.step_id, {})
        self._run_rows(step.num_scheduled_tokens, result)
        if self._held:
            result.requests |= {
                i: self._run(i, count)
                for i, count in step.num_scheduled_tokens.items()
                if i in self._held
            }
        result.forward_seconds = time.perf_counter() - begin
        return result

    def _run_rows(self, counts: dict[str, int], result: StepResult) -> None:
        """Compute the requests that are in rows, unless one has failed."""
        rows, failed, requests = self._rows, self._failed, result.requests
        if self._held:
            counts = {i: count for i, count in counts.items() if i in rows}
        if failpoints.PLAN is not None:
            for request_id in counts:
                if failpoints.hit("engine.step.sample", request_id):
                    failed[request_id] = NOT_FINITE
        if failed:
            requests |= {i: RequestStepResult(error=failed[i]) for i in counts if i in failed}
            counts = {i: count for i, count in counts.items() if i not in failed}
        result.tokens, partial = rows.run(counts)
        requests |= {i: RequestStepResult() for i in partial}

    def _take_changes(self, step: ScheduledStep) -> None:
        for request_id in step.gone_request_ids:
            self._held.pop(request_id, None)
            self._rows.remove(request_id)
            self._failed.pop(request_id, None)
        for new in step.new_requests:
            if _is_plain(new):
                self._rows.add(new)
                continue
            held = self._held[new.request_id] = _SimRequest(new)
            for position, token in enumerate(held.token_ids[held.num_prompt :]):
                if token != self._token(held, position):
                    raise RuntimeError(f"{new.request_id!r} came back with another output")
        for request_id, block_ids in step.new_block_ids.items():
            if request_id in self._rows:
                self._rows.add_blocks(request_id, len(block_ids[0]))
            else:
                self._held[request_id].num_blocks += len(block_ids[0])

    def _run(self, request_id: str, count: int) -> RequestStepResult:
        held = self._held[request_id]
        if failpoints.PLAN is not None and failpoints.hit("engine.step.sample", request_id):
            held.error = NOT_FINITE
        if held.error is not None:
            return RequestStepResult(error=held.error)
        first = held.num_computed
        held.num_computed += count
        if held.num_computed > len(held.token_ids):
            raise RuntimeError(f"{request_id!r} computes a token that does not exist yet")
        if held.num_computed > held.num_blocks * self._block_size:
            raise RuntimeError(f"{request_id!r} has no block for a token that it computes")
        result = RequestStepResult()
        if held.params.prompt_logprobs is not None:
            last = min(held.num_computed + 1, held.num_prompt)
            result.prompt_logprobs = [
                self._logprobs(token, held.params.prompt_logprobs)
                for token in held.token_ids[first + 1 : last]
            ]
        if held.num_computed == len(held.token_ids):
            self._sample(held, result)
        return result

    def _sample(self, held: _SimRequest, result: RequestStepResult) -> None:
        try:
            token = self._token(held, len(held.token_ids) - held.num_prompt)
        except ValueError:
            held.error = result.dead_end = (
                "no token is possible with allowed_token_ids, bad_words and min_tokens"
            )
            return
        held.token_ids.append(token)
        result.token_ids = [token]
        if held.params.wants_logprobs:
            result.logprobs = [self._logprobs(token, held.params.logprobs or 0)]

    def _token(self, held: _SimRequest, position: int) -> int:
        """The token at a position of a request's output."""
        params, seed, ends = held.params, held.seed, self._ends
        if not held.bad_words and params.allowed_token_ids is None and not params.min_tokens:
            return simulated_token(self._seed, seed, position, self._vocab_size, self._goes_on)
        end = held.num_prompt + position
        refused = {
            word[-1]
            for word in held.bad_words
            if held.token_ids[max(0, end - len(word) + 1) : end] == word[:-1]
        }
        if position < params.min_tokens:
            refused |= held.stops
        allowed = params.allowed_token_ids

        def is_permitted(token: int) -> bool:
            if allowed is not None:
                return token in allowed and token not in refused
            return token not in ends and token not in refused

        return simulated_token(self._seed, seed, position, self._vocab_size, is_permitted)

    def _goes_on(self, token: int) -> bool:
        return token not in self._ends

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """Certainty: the token, then others by number."""
        wanted = self._vocab_size if count == -1 else min(count, self._vocab_size)
        others = [i for i in range(wanted + 1) if i != token][: max(0, wanted - 1)]
        logprobs = [0.0] + [IMPOSSIBLE] * len(others)
        return TokenLogprobs([token, *others], logprobs, list(range(1, len(logprobs) + 1)))


def _is_plain(new: NewRequest) -> bool:
    """True if nothing but tokens is asked for, and none is refused that others are not."""
    params = new.request.params
    return not (
        new.request.bad_words_token_ids
        or params.allowed_token_ids is not None
        or params.min_tokens
        or params.wants_logprobs
        or params.prompt_logprobs is not None
    )


def _pass(point: str, step: ScheduledStep) -> None:
    if failpoints.PLAN is not None:
        for request_id in step.num_scheduled_tokens:
            failpoints.hit(point, request_id)
