"""The worker that owns a model, its cache and its requests on one device."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, ModelError, UnsupportedFeature
from headrace_core.executor import MemoryProfile
from headrace_core.kv import CacheSpec, KVCacheConfig
from headrace_core.model import (
    AttentionLayer,
    CausalLM,
    StateLayer,
    SupportsPooling,
    SupportsRecurrence,
    takes_prompt_embeds,
)
from headrace_core.multimodal import MediaInput
from headrace_core.ops import OpTable
from headrace_core.pooling import PoolingInfo
from headrace_core.sampling.logits_processor import LogitsProcessor
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.config import ProfilerConfig
from headrace_engine.encoder.runner import EncodingRunner
from headrace_engine.encoder.slices import EncoderSlices
from headrace_engine.encoder.transfer import EncoderTransfer
from headrace_engine.encoder.vectors_ahead import VectorsAhead
from headrace_engine.execution.binding import ThreadBinding
from headrace_engine.execution.cache import (
    Buffers,
    bind_cache,
    cache_specs,
    clear_blocks,
    cross_groups,
    group_backends,
    state_groups,
    unbind,
)
from headrace_engine.execution.capture import Capture, capture_steps
from headrace_engine.execution.dummy import DummySteps
from headrace_engine.execution.kv_scales import (
    measure_kv_scales,
    measuring_batch,
    one_byte_layers,
)
from headrace_engine.execution.largest import LargestItem, LargestStep
from headrace_engine.execution.measure import MemoryMeter, memory_meter
from headrace_engine.execution.memory import readable
from headrace_engine.execution.pooling import PoolingRunner, needs_all_rows
from headrace_engine.execution.populate import WHOLE, CachePopulator
from headrace_engine.execution.profiling import StepProfiler
from headrace_engine.execution.refusal import memory_errors
from headrace_engine.execution.reloading import load_changes
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.execution.scale_constants import ScaleConstants
from headrace_engine.sampling.processors import ProcessorStage
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.structured.matching import ConstraintMaker
from headrace_engine.structured.store import GrammarStore

logger = logging.getLogger(__name__)

WARM_UP_SEQS = 16
"""Requests of the largest warm-up step on a CPU, where nothing is compiled or sized for more."""


class ModelWorker:
    """Implements :class:`headrace_core.executor.Worker` for one device. One thread only.

    Args:
        build_model: builds and loads the model; called once, by :meth:`load`.
        ops: whose ``sample`` and ``top_logprobs`` choose and describe tokens.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        dtype: the activations' dtype; for messages.
        vocab_size: width of the logits.
        max_model_len: longest context.
        max_num_batched_tokens: most tokens in one step.
        max_num_seqs: most requests in one step.
        logprobs_mode: see :class:`~headrace_engine.sampling.Sampler`.
        seed: of requests that bring none.
        num_threads: CPU threads that torch uses in this process; 0 leaves its setting.
        cores: of the threads that compute, the worker's first; see
            :class:`~headrace_engine.execution.binding.ThreadBinding`. Empty: not bound.
        capture: how steps are captured; None: all run eagerly.
        cache_ahead_bytes: see :class:`~headrace_engine.execution.populate.CachePopulator`; CPU only.
        kv_scales: measure the cache's scales, with these constants; None: leave them.
        grammars: of structured output; None: a request that needs one fails.
        make_processors: makes the logits processors for the device; None: there are none.
        prompt_embeds: whether prompts may be embeddings, which the model must support then.
        profiler: what :meth:`start_profile` records; None: nothing.
        max_media_vectors: vectors of media that are kept for items that come again.
        largest_media: makes an item of each kind to measure with; None: requests bring
            none.
        pooling: what the model pools, which it must support then; None: it generates.
        rebuild_model: as ``build_model``, given changes of the load configuration; None: weights are
            read once.
        make_transfer: makes the worker's end of a disaggregated encoder; None: there is none.
        slices: where towers pause; None: nothing is embedded beside steps.
        encoder_share: seconds of that for each second of steps.
    """

    def __init__(
        self,
        build_model: Callable[[], CausalLM],
        *,
        ops: OpTable,
        device: str,
        dtype: str,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        logprobs_mode: str = "raw_logprobs",
        seed: int = 0,
        num_threads: int = 0,
        cores: tuple[int, ...] = (),
        capture: Capture | None = None,
        cache_ahead_bytes: int = 0,
        kv_scales: ScaleConstants | None = None,
        grammars: GrammarStore | None = None,
        make_processors: Callable[[torch.device], Sequence[LogitsProcessor]] | None = None,
        prompt_embeds: bool = False,
        profiler: ProfilerConfig | None = None,
        largest_media: Callable[[], Sequence[LargestItem]] | None = None,
        max_media_vectors: int = 0,
        pooling: PoolingInfo | None = None,
        rebuild_model: Callable[[Mapping[str, str]], CausalLM] | None = None,
        make_transfer: Callable[[], EncoderTransfer] | None = None,
        slices: EncoderSlices | None = None,
        encoder_share: float = 0.0,
    ) -> None:
        self._build_model = build_model
        self._device = torch.device(device)
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._kernels = sorted(set(ops.providers.values()))
        self._batch_invariant = ops.row_invariant
        self._sampler = Sampler(ops.sample, ops.top_logprobs, logprobs_mode=logprobs_mode)
        self._seed = seed
        self._num_threads = num_threads
        self._binding = ThreadBinding(cores)
        self._capture = capture
        self._cache_ahead_bytes = cache_ahead_bytes
        self._kv_scales = kv_scales
        self._grammars = grammars
        self._make_processors = make_processors
        self._prompt_embeds = prompt_embeds
        self._largest_media = largest_media
        self._max_media_vectors = max_media_vectors
        self._pooling = pooling
        self._rebuild_model = rebuild_model
        self._make_transfer = make_transfer
        self._slices = slices
        self._encoder_share = encoder_share
        self._transfer: EncoderTransfer | None = None
        self._load_changes: Mapping[str, str] = {}
        self._constraints: ConstraintMaker | None = None
        self._processors: ProcessorStage | None = None
        self._profiler = StepProfiler(profiler or ProfilerConfig(), self._device)
        self._meter: MemoryMeter = memory_meter(self._device)
        self._launching: Callable[[], None] = lambda: None
        self._available = 0
        self._weights = self._activations = 0
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._layers: Mapping[str, AttentionLayer] = {}
        self._states: Mapping[str, StateLayer] = {}
        self._cache: KVCacheConfig | None = None
        self._buffers: Buffers = []
        self._populators: list[CachePopulator] = []

    def load(self) -> None:
        """Build the model, noting the memory that was free before and what the model took."""
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        self._binding.enter()
        if self._make_transfer is not None:  # what it refuses is known before weights are read
            self._transfer = self._make_transfer()
        self._available = self._meter.available()
        before = self._meter.used()
        with memory_errors("the model's weights"):
            model = self._build_model()
        self._hold(model)
        if self._prompt_embeds and not takes_prompt_embeds(model):
            raise ConfigError(
                "model.enable_prompt_embeds = True: must be False for this model "
                f"({type(model).__name__}), which takes tokens only",
                field="model.enable_prompt_embeds",
            )
        if self._pooling is not None and not isinstance(model, SupportsPooling):
            raise ModelError(
                f"{type(model).__name__} has no pooler: it cannot run with --runner pooling"
            )
        if self._prompt_embeds:
            logger.info("prompt embeddings: steps that hold some run eagerly")
        if self._make_processors is not None:
            made = self._make_processors(self._device)
            self._processors = ProcessorStage(made) if made else None
        self._meter.trim()
        self._weights = max(self._meter.used() - before, _parameter_bytes(model))
        logger.info(
            "model loaded on %s in %s: %.1f MiB", self._device, self._dtype, self._weights / 2**20
        )

    def _hold(self, model: CausalLM) -> None:
        """Take a model, whose layers have no cache yet."""
        self._model = model
        self._layers = model.attention_layers()
        self._states = model.state_layers() if isinstance(model, SupportsRecurrence) else {}
        for layer in self._states.values():
            layer.bind_states(None, 0)

    def kv_specs(self) -> dict[str, CacheSpec]:
        """See :func:`~headrace_engine.execution.cache.cache_specs`."""
        self._loaded()
        return cache_specs(self._layers, self._states)

    @torch.inference_mode()
    def profile(self) -> MemoryProfile:
        """Measure the largest step without a cache, its sampling included.

        On a CPU it is run only if it is small (:mod:`~headrace_engine.execution.largest`); a
        larger one is reckoned from one prompt of that length, for what grows with the tokens, and
        one step of that many requests, for what grows with the rows that are sampled.

        ``activations``: on CUDA the growth of torch's peak of allocated memory; on a CPU the
        growth of the process's resident set (the kernel's high-water mark, reset before), which
        counts only what the step needs beyond memory that the process already holds, and is never
        less than the step's logits take. ``weights``: what loading added to the same measure, and
        at least the size of the model's parameters if it is a ``torch.nn.Module``.
        ``available``: free before loading. ``step_seconds``: the same step's time.
        Where requests bring media, what the most of them that a step can hold take is added to both.
        """
        tokens, seqs = self._max_num_batched_tokens, self._max_num_seqs
        largest = LargestStep(self._dummy_steps(), self._meter, tokens, seqs)
        activations, seconds = largest.measure(whole=self._device.type != "cpu")
        items = self._largest_media() if self._largest_media is not None else ()
        media, media_seconds = largest.measure_media(items)
        self._meter.trim()
        logits = 0 if self._pooling is not None else 4 * self._vocab_size * min(seqs, tokens)
        activations = max(activations, logits)
        activations += self._captured_bytes(activations, logits)
        self._activations = activations + media
        return MemoryProfile(
            self._weights, self._activations, self._available, seconds + media_seconds
        )

    def _captured_bytes(self, activations: int, logits: int) -> int:
        """Bytes that captured steps will hold besides: their share of the largest step's activations,
        and logits, also in the activations' dtype, of as many rows as that share samples."""
        if self._capture is None or not self._capture.largest:
            return 0
        share = self._capture.largest / self._max_num_batched_tokens
        rows = min(1.0, self._capture.largest / self._max_num_seqs)
        return int(share * activations + 2 * rows * logits)

    def allocate_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache, bind it to the layers, and get ready for steps."""
        model = self._loaded()
        backends = group_backends(self._layers, config)
        with memory_errors(f"a KV cache of {readable(config.num_bytes)}"):
            self._buffers = bind_cache(self._layers, self._states, config, self._device)
        self._cache = config
        if self._device.type == "cpu":
            self._populators = list(self._make_populators(config))
        if self._grammars is not None:
            self._constraints = ConstraintMaker(self._grammars)
        self._runner = self._runner_class()(
            model,
            backends,
            config,
            device=self._device,
            vocab_size=self._vocab_size,
            sampler=self._sampler,
            seed=self._seed,
            populators=self._populators,
            constraints=self._constraints,
            processors=self._processors,
            token_types=self._takes_token_types,
            max_media_vectors=self._max_media_vectors,
            transfer=self._transfer,
            make_ahead=None if self._slices is None else self._make_ahead,
        )
        self._runner.launching = self._launching

    def _make_ahead(self, embed: Callable[[MediaInput], Tensor]) -> VectorsAhead:
        assert self._slices is not None
        return VectorsAhead(embed, self._slices, self._encoder_share, self._max_num_batched_tokens)

    def _runner_class(self) -> type[ModelRunner]:
        if self._transfer is not None and self._transfer.is_producer:
            return EncodingRunner
        return ModelRunner if self._pooling is None else PoolingRunner

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Measure the cache's scales, if asked to. Run a decode step of one and of many requests,
        and a prompt, writing to no block; then capture steps, and begin to make the cache's memory
        resident."""
        tokens, seqs = self._max_num_batched_tokens, self._max_num_seqs
        if self._kv_scales is not None:  # first: recordings hold scales as constants
            self._measure_kv_scales(self._kv_scales)
        prompt = self._ready().block_size or WARM_UP_SEQS
        dummy = self._dummy_steps()
        dummy.run(1, 1)
        many = min(seqs, WARM_UP_SEQS) if self._device.type == "cpu" else seqs
        dummy.run(min(many, tokens), many)
        dummy.run(min(prompt, tokens), 1)
        if self._capture is not None:
            runner, cache, all_rows, parts = self._ready(), self._cache, False, False
            assert cache is not None
            if isinstance(runner, PoolingRunner):
                assert self._pooling is not None
                parts = not runner.backends
                all_rows = runner.all_rows = needs_all_rows(runner.model, self._pooling)
            runner.graph = capture_steps(
                self._capture,
                runner.whole_step,
                max_num_seqs=seqs,
                num_groups=len(runner.backends),
                device=self._device.type,
                all_rows=all_rows,
                parts=parts,
                token_types=self._takes_token_types,
                cross_groups=tuple(cross_groups(cache)),
                state_groups=tuple(state_groups(cache)),
            )
        for populator in self._populators:
            populator.start()
        self._binding.narrow()

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step, then a slice of what is embedded beside steps."""
        begin = time.perf_counter()
        if not self._profiler.armed:
            result = self._ready().execute(step)
        else:
            with self._profiler.step():
                result = self._ready().execute(step)
        if self._slices is not None or step.media_ahead:
            vectors, seconds = self._ready().media_vectors, time.perf_counter() - begin
            result.embedded = vectors.work_ahead(step.media_ahead, seconds)
        return result

    def when_launching(self, call: Callable[[], None]) -> None:
        """See :meth:`headrace_core.executor.Worker.when_launching`."""
        self._launching = call
        if self._runner is not None:
            self._runner.launching = call

    @property
    def rank(self) -> int:
        """Its place among the workers."""
        return 0

    @property
    def device(self) -> torch.device:
        """The device on which the model runs."""
        return self._device

    def get_model(self) -> Any:
        """The built model, for functions of ``collective_rpc``."""
        return self._loaded()

    def report(self) -> dict[str, Any]:
        """Facts about this worker, as plain data."""
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "device": str(self._device),
            "dtype": self._dtype,
            "num_threads": torch.get_num_threads(),
            "weights_bytes": self._weights,
            "activations_bytes": self._activations,
            "cache_bytes": sum(tensor.nbytes for pool in self._buffers for tensor in pool),
            "torch": str(torch.__version__),
            "kernels": self._kernels,
            "batch_invariant": self._batch_invariant,
            **self._media_report(),
        }

    def _media_report(self) -> dict[str, int]:
        """Numbers of media items that towers embedded, and that other engines gave and were offered."""
        found = (
            {}
            if self._runner is None
            else {"media_embedded": self._runner.media_vectors.num_embedded}
        )
        if self._transfer is not None:
            found["media_loaded"] = self._transfer.num_loaded
            found["media_saved"] = self._transfer.num_saved
        return found

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        """See :meth:`headrace_core.executor.Worker.apply_model`."""
        return function(self._loaded())

    def start_profile(self) -> None:
        """Record the coming steps; see :meth:`StepProfiler.start`."""
        self._profiler.start()

    def stop_profile(self) -> None:
        """Write what was recorded; see :meth:`StepProfiler.stop`."""
        self._profiler.stop()

    def update_config(self, changes: object) -> None:
        """Change what :meth:`reload_weights` reads: ``{"load_config": {"load_format": "auto"}}``.

        Raises:
            RequestError: something else is to change.
        """
        self._load_changes = load_changes(changes)

    def reload_weights(self) -> None:
        """Build the model again under the same cache plan, and capture its steps again.

        The old model goes first, so that memory for one is enough: where the new weights cannot be
        read there is none until a later call reads some. No request may run, and what is cached is
        lost.

        Raises:
            UnsupportedFeature: this worker cannot. WeightsError: see the loader.
        """
        cache = self._cache
        if self._rebuild_model is None or cache is None:
            raise UnsupportedFeature("reload_weights: this worker reads its weights once")
        if self._transfer is not None:
            raise UnsupportedFeature(
                "reload_weights: engines of a disaggregated encoder read their weights once, as they know "
                "vectors by the model (ec_transfer_config)"
            )
        self._free()
        self._cache = cache  # the plan stays, whatever happens now
        self._binding.widen()
        self._hold(self._rebuild_model(self._load_changes))
        self.allocate_cache(cache)
        self.warm_up()

    def close(self) -> None:
        """Free model, cache and requests. Idempotent."""
        self._free()
        self._processors = None
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        self._binding.leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _free(self) -> None:
        """Let go of the model, its recordings, its cache and its requests."""
        for populator in self._populators:
            populator.close()
        self._populators = []
        if self._constraints is not None:
            self._constraints.close()
            self._constraints = None
        if self._runner is not None:
            self._runner.media_vectors.clear()
            if self._runner.graph is not None:
                self._runner.graph.close()
        unbind(self._layers, self._states)
        self._layers, self._states = {}, {}
        self._model = self._runner = self._cache = None
        self._buffers = []

    def _make_populators(self, config: KVCacheConfig) -> Iterator[CachePopulator]:
        """One for each pool, with its share of what is to be resident ahead of use."""
        for pool, (buffers, num_blocks) in enumerate(zip(self._buffers, config.pools)):
            ahead = self._cache_ahead_bytes
            if ahead != WHOLE:
                ahead = ahead * num_blocks * config.block_bytes(pool) // config.num_bytes
            yield CachePopulator(buffers, num_blocks, ahead, torch.get_num_threads())

    def _measure_kv_scales(self, constants: ScaleConstants) -> None:
        model, runner, cache = self._loaded(), self._ready(), self._cache
        assert cache is not None
        one_byte_layers(self._layers)  # before a prompt is laid out in blocks that there are not
        batch, blocks = measuring_batch(
            cache,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            device=self._device,
        )
        measure_kv_scales(
            self._layers, constants, lambda: model.forward(runner.with_metadata(batch))
        )
        clear_blocks(self._buffers, self._layers, cache, blocks)

    def _dummy_steps(self) -> DummySteps:
        """On the model as it is now, with its cache if it has one."""
        return DummySteps(
            self._loaded(),
            sampler=self._sampler,
            pooling=self._pooling,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            device=self._device,
            cache=self._cache,
            runner=self._runner,
        )

    @property
    def _takes_token_types(self) -> bool:
        return self._pooling is not None and self._pooling.token_types

    def _loaded(self) -> CausalLM:
        if self._model is None:
            raise ModelError("the worker has no model: load() has not been called, or close() has")
        return self._model

    def _ready(self) -> ModelRunner:
        self._loaded()
        if self._runner is None:
            raise ModelError("the worker has no cache: allocate_cache() has not been called")
        return self._runner


def _parameter_bytes(model: CausalLM) -> int:
    if not isinstance(model, torch.nn.Module):
        return 0
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
