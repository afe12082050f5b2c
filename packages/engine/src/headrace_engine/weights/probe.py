"""Trying a model on prompts before it serves: with a small cache of its own, by the scheduler and runner that
would serve it. With several ranks, each has its part of that cache, and rank 0 leads the passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from headrace_core.errors import RequestError
from headrace_core.kv import CacheSpec, KVCacheConfig
from headrace_core.model import CausalLM, StateLayer, SupportsRecurrence
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.config import SchedulerConfig
from headrace_engine.execution.cache import bind_cache, cache_specs, group_backends, unbind
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.kv.factory import make_manager
from headrace_engine.kv.grouping import of_layers, plan_groups
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_engine.weights.order import Probe

FIRST_TOKENS = 8
"""Tokens of the prompt that every generating model is tried with."""
SPARE_BLOCKS = 4
"""Blocks of each group beside those of the longest probe's tokens."""


class Limits(NamedTuple):
    """Sizes that probes keep to."""

    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int


class Tried(NamedTuple):
    """What a model made of one probe."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the prompt's tokens but the first, and of the generated ones."""
    num_prompt_logprobs: int


@dataclass(slots=True)
class _Try:
    """One probe that runs."""

    runner: ModelRunner
    scheduler: Scheduler
    tokens: list[int] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def advance(self) -> bool:
        """Run a step; False: there was none to run any more.

        Raises:
            RequestError: the model fails in it.
        """
        step = self.scheduler.schedule()
        if step is None:
            return False
        result = self.runner.execute(step)
        result.finish()
        for output in self.scheduler.update(step, result):
            if output.error is not None:
                raise _failed(output.error)
            self.tokens += output.new_token_ids
            self.prompt += [one.logprobs[0] for one in output.prompt_logprobs or ()]
            self.logprobs += [one.logprobs[0] for one in output.logprobs or ()]
        return True

    @property
    def tried(self) -> Tried:
        return Tried(self.tokens, [*self.prompt, *self.logprobs], len(self.prompt))


class ProbeCache:
    """A model's layers bound to a small cache of their own, until :meth:`close`.

    Args:
        like: the cache of the model that serves, this rank's layers in the groups of all ranks; None: there
            is one rank.
        length: tokens of the longest probe, its continuation included.
    """

    def __init__(
        self, model: CausalLM, device: torch.device, length: int, like: KVCacheConfig | None = None
    ) -> None:
        self.layers = model.attention_layers()
        self._states: dict[str, StateLayer] = (
            dict(model.state_layers()) if isinstance(model, SupportsRecurrence) else {}
        )
        specs: dict[str, CacheSpec] = cache_specs(self.layers, self._states)
        groups = like.groups if like is not None else plan_groups(specs) if specs else ()
        pools = [1] * (1 + max((group.pool for group in groups), default=-1))
        for group in groups:
            pools[group.pool] += -(-length // group.spec.block_size) + SPARE_BLOCKS
        self.config = of_layers(KVCacheConfig(tuple(pools), groups), specs)
        try:
            self._buffers = bind_cache(self.layers, self._states, self.config, device)
        except BaseException:
            self.close()
            raise

    def make_runner(
        self,
        model: CausalLM,
        sampler: Sampler,
        limits: Limits,
        device: torch.device,
    ) -> ModelRunner:
        """A runner of the model with this cache."""
        backends = group_backends(self.layers, self.config)
        return ModelRunner(
            model,
            backends,
            self.config,
            device=device,
            vocab_size=limits.vocab_size,
            sampler=sampler,
            seed=0,
        )

    def close(self) -> None:
        """Leave the layers without a cache. Idempotent."""
        unbind(self.layers, self._states)


class ModelProbe:
    """Runs probes on a model whose layers have no cache, and leaves them without one.

    Args:
        model: generates text from tokens alone.
        sampler: of raw log-probabilities.
    """

    def __init__(
        self, model: CausalLM, sampler: Sampler, limits: Limits, device: torch.device
    ) -> None:
        self._model, self._sampler, self._limits, self._device = model, sampler, limits, device
        self._probes: Sequence[Probe] = ()
        self._max_perplexity: float | None = None
        self._tries: list[Probe] = []
        self._found: list[Tried] = []
        self._running: _Try | None = None
        self._cache: ProbeCache | None = None

    def run(self, probes: Sequence[Probe], max_perplexity: float | None) -> float | None:
        """Try the model; returns the perplexity of the prompts, None if there are no tokens to count.

        Raises:
            RequestError: it answers otherwise than it should, or with what is no number; says where.
        """
        if not self.begin(probes, max_perplexity):
            return None
        try:
            self.bind()
            while self.advance():
                pass
        finally:
            self.close()
        return self.perplexity()

    def begin(self, probes: Sequence[Probe], max_perplexity: float | None) -> int:
        """Take an order: tokens of the longest probe, 0 if there is nothing to try.

        Raises:
            RequestError: a probe is not for this model.
        """
        vocab = self._limits.vocab_size
        for index, probe in enumerate(probes):
            self._check(probe, f"probe[{index}]")
        first = Probe([token % vocab for token in range(FIRST_TOKENS)], [])
        self._probes, self._max_perplexity = probes, max_perplexity
        self._tries = [first, *probes] if self._limits.max_model_len > FIRST_TOKENS else [*probes]
        return max(map(_length, self._tries), default=0)

    @torch.inference_mode()
    def bind(self, like: KVCacheConfig | None = None) -> None:
        """Give the model a cache; see :class:`ProbeCache`."""
        self._cache = ProbeCache(
            self._model, self._device, max(map(_length, self._tries)), like=like
        )

    @torch.inference_mode()
    def advance(self) -> bool:
        """Run a pass; False: all probes have been run.

        Raises:
            RequestError: the model fails in it.
        """
        while self._running is None or not self._running.advance():
            if self._running is not None:
                self._found.append(self._running.tried)
                self._running = None
            if len(self._found) == len(self._tries):
                return False
            self._running = self._try(self._tries[len(self._found)])
        return True

    def close(self) -> None:
        """Leave the model without a cache. Idempotent."""
        cache, self._cache, self._running = self._cache, None, None
        if cache is not None:
            cache.close()

    def perplexity(self) -> float | None:
        """See :meth:`run`; all probes have been run.

        Raises:
            RequestError: see :meth:`run`.
        """
        probes, found = self._probes, self._found
        for where, one in zip(
            ["a prompt of its own", *_names(probes)][-len(self._tries) :], found, strict=True
        ):
            if not all(math.isfinite(value) for value in one.logprobs):
                raise _failed(f"its log-probabilities for {where} are no finite numbers")
        tried = found[len(found) - len(probes) :]
        _check_tokens(probes, tried)
        return _perplexity(tried, self._max_perplexity)

    def _check(self, probe: Probe, where: str) -> None:
        longest, vocab = self._limits.max_model_len, self._limits.vocab_size
        if _length(probe) > longest:
            raise RequestError(
                f"{where}: {_length(probe)} tokens with its continuation: must be at most {longest}",
                param=where,
            )
        wrong = [t for t in (*probe.prompt_token_ids, *probe.expected_token_ids) if t >= vocab]
        if wrong:
            raise RequestError(
                f"{where}: token {wrong[0]}: must be below {vocab}, the size of the vocabulary",
                param=where,
            )

    def _try(self, probe: Probe) -> _Try:
        limits, cache = self._limits, self._cache
        assert cache is not None, "bind() comes first"
        runner = cache.make_runner(self._model, self._sampler, limits, self._device)
        config = SchedulerConfig(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=1,
            max_num_shared_tokens=limits.max_num_batched_tokens,
            async_scheduling=False,
        )
        manager = make_manager(
            cache.config, False, limits.max_model_len, limits.max_num_batched_tokens
        )
        scheduler = Scheduler(config, manager, max_model_len=limits.max_model_len)
        scheduler.add(_request(probe))
        return _Try(runner, scheduler)


def _request(probe: Probe) -> CoreRequest:
    count = max(1, len(probe.expected_token_ids))
    params = SamplingParams(
        temperature=0, max_tokens=count, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    return CoreRequest("probe", list(probe.prompt_token_ids), params, frozenset(), count, 0.0)


def _length(probe: Probe) -> int:
    return len(probe.prompt_token_ids) + max(1, len(probe.expected_token_ids))


def _names(probes: Sequence[Probe]) -> list[str]:
    return [f"probe[{index}]" for index in range(len(probes))]


def _check_tokens(probes: Sequence[Probe], tried: Sequence[Tried]) -> None:
    for name, probe, one in zip(_names(probes), probes, tried):
        expected = probe.expected_token_ids
        if expected and one.token_ids != expected:
            place = next(i for i, (a, b) in enumerate(zip(one.token_ids, expected)) if a != b)
            raise _failed(
                f"{name}: token {place} of its continuation is {one.token_ids[place]}, not "
                f"{expected[place]}"
            )


def _perplexity(tried: Sequence[Tried], most: float | None) -> float | None:
    values = [value for one in tried for value in one.logprobs[: one.num_prompt_logprobs]]
    if not values:
        return None
    mean = -math.fsum(values) / len(values)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    if most is not None and not perplexity <= most:
        raise _failed(
            f"its perplexity on the probes is {perplexity:.4g}, above max_perplexity = {most:g}"
        )
    return perplexity


def _failed(why: str) -> RequestError:
    return RequestError(f"the new weights fail their probe: {why}", param="probe")
