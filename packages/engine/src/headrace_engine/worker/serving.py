"""The worker that owns a model, its cache and its requests on one device."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace_core.attention import AttentionBackend
from headrace_core.errors import ConfigError, ModelError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import CacheSpec, KVCacheConfig
from headrace_core.lora import AdapterSlots
from headrace_core.model import (
    AttentionLayer,
    CausalLM,
    LaunchesPasses,
    StateLayer,
    SupportsPooling,
    SupportsPromptEmbeds,
    SupportsRecurrence,
)
from headrace_core.multimodal import MediaInput
from headrace_core.ops import OpTable
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.encoder.runner import EncodingRunner
from headrace_engine.encoder.transfer import EncoderTransfer
from headrace_engine.encoder.vectors_ahead import VectorsAhead
from headrace_engine.execution.binding import ThreadBinding
from headrace_engine.execution.cache import (
    Buffers,
    bind_cache,
    cache_specs,
    clear_blocks,
    group_backends,
    unbind,
)
from headrace_engine.execution.dummy import DummySteps
from headrace_engine.execution.kv_scales import (
    measure_kv_scales,
    measuring_batch,
    one_byte_layers,
)
from headrace_engine.execution.measuring.kept_costs import StepCost
from headrace_engine.execution.measuring.largest import LargestStep
from headrace_engine.execution.measuring.measure import MemoryMeter, memory_meter
from headrace_engine.execution.memory import readable
from headrace_engine.execution.pooling import PoolingRunner, needs_all_rows
from headrace_engine.execution.populate import WHOLE, CachePopulator
from headrace_engine.execution.profiling import StepProfiler
from headrace_engine.execution.refusal import memory_errors
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.execution.scale_constants import ScaleConstants
from headrace_engine.kv.grouping import of_layers
from headrace_engine.kv_transfer.layout import layout_of_rank, layouts_of_groups
from headrace_engine.kv_transfer.moves import MOVES
from headrace_engine.kv_transfer.parts import GroupParts
from headrace_engine.kv_transfer.worker import BlockMover, splits_of_groups
from headrace_engine.lora.step_adapters import StepAdapters
from headrace_engine.multiproc.staged import StagedRunner
from headrace_engine.sampling.processors import ProcessorStage
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sleep.engine_sleep import KV_CACHE, WEIGHTS
from headrace_engine.sleep.memory import SleepingMemory
from headrace_engine.speculation.draft_head import DraftHead
from headrace_engine.speculation.draft_model import draft_layers
from headrace_engine.structured.matching import ConstraintMaker
from headrace_engine.worker.guessing import ModelProposer, let_guess
from headrace_engine.worker.recording import (
    captured_bytes,
    meets_engines,
    record_together,
    step_recorder,
)
from headrace_engine.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

WARM_UP_SEQS = 16
"""Requests of the largest warm-up step on a CPU, where nothing is compiled or sized for more."""


class ServingWorker:
    """Computes steps with a model on one device. One thread only. With weights that may change it is a
    :class:`~headrace_engine.weights.worker.ModelWorker`.

    Args:
        settings: everything that it is told.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._limits, self._ranks = settings.limits, settings.ranks
        self._build_model = settings.build_model
        self._device = torch.device(settings.device)
        ops, threads = settings.ops, settings.threads
        self._sampler = Sampler(
            ops.sample, ops.top_logprobs, logprobs_mode=settings.sampling.logprobs_mode
        )
        self._binding = ThreadBinding(() if threads is None else threads.cores)
        self._memory = SleepingMemory(settings.weights.memory_pool)
        self._profiler = StepProfiler(settings.profiler, self._device)
        self._meter: MemoryMeter = memory_meter(self._device)
        self._launching: Callable[[], None] = lambda: None
        self._available = 0
        self._weights = self._activations = 0
        self._path: str | None = None
        """Of the checkpoint that serves, if it is another than at the start."""
        self._model: CausalLM | None = None
        self._draft: CausalLM | None = None
        self._head: DraftHead | None = None
        self._draft_proposer: ModelProposer | None = None
        self._adapters: StepAdapters | None = None
        self._transfer: EncoderTransfer | None = None
        self._constraints: ConstraintMaker | None = None
        self._processors: ProcessorStage | None = None
        self._runner: ModelRunner | None = None
        self._layers: Mapping[str, AttentionLayer] = {}
        self._states: Mapping[str, StateLayer] = {}
        self._cache: KVCacheConfig | None = None
        self._buffers: Buffers = []
        self._populators: list[CachePopulator] = []
        self._mover: BlockMover | None = None
        self._parts: Sequence[GroupParts] = ()

    def load(self) -> None:
        """Build the model, noting the memory that was free before and what the model took."""
        settings, leader = self._settings, self._ranks.leader
        if settings.threads is not None:
            torch.set_num_threads(settings.threads.num_threads)
        self._binding.enter()
        make_transfer = settings.media.make_transfer
        if make_transfer is not None:  # what it refuses is known before weights are read
            self._transfer = make_transfer()
        ahead = settings.weights.packed_ahead()
        self._available = self._meter.available() // self._ranks.memory_share + ahead.reserved
        before = self._meter.used() - ahead.resident
        with memory_errors("the model's weights"), self._memory.region(WEIGHTS):
            slots = self._make_slots()
            model = self._build_model(*slots)
            build_draft = settings.drafts.build_model
            draft = None if build_draft is None else build_draft()
        if leader is not None:
            leader.lead(model)
            leader.lead(self._ranks.experts)
        self._hold(model, draft)
        self._check_fits(model)
        if settings.prompt_embeds:
            logger.info("prompt embeddings: steps that hold some run eagerly")
        if settings.sampling.make_processors is not None:
            made = settings.sampling.make_processors(self._device)
            self._processors = ProcessorStage(made) if made else None
        self._meter.trim()
        known = _parameter_bytes(model) + sum(one.num_bytes for one in slots)
        self._weights = max(self._meter.used() - before, known)
        size = self._weights / 2**20
        logger.info("model loaded on %s in %s: %.1f MiB", self._device, settings.dtype, size)

    def _check_fits(self, model: CausalLM) -> None:
        """Check that a model takes what requests bring and gives what they ask for.

        Raises:
            ConfigError: it takes tokens only, and prompts may be embeddings.
            ModelError: it has no pooler, and what is served is pooled.
        """
        if self._settings.prompt_embeds and not _takes_prompt_embeds(model):
            raise ConfigError(
                "model.enable_prompt_embeds = True: must be False for this model "
                f"({type(model).__name__}), which takes tokens only",
                field="model.enable_prompt_embeds",
            )
        if self._settings.pooling is not None and not isinstance(model, SupportsPooling):
            raise ModelError(
                f"{type(model).__name__} has no pooler: it cannot run with --runner pooling"
            )

    def _make_slots(self) -> tuple[AdapterSlots, ...]:
        """The slots of a model that is built next, if it is to have any."""
        adapters = self._settings.adapters
        if adapters.make_slots is None:
            return ()
        assert adapters.store is not None
        own = adapters.make_slots()
        adapters.store.bind(self._use_slots(own))
        return (own,)

    def _use_slots(self, own: AdapterSlots) -> AdapterSlots:
        """Have steps use the slots of a model: those for which adapters are read."""
        store, leader = self._settings.adapters.store, self._ranks.leader
        assert store is not None
        slots = own if leader is None else leader.lead_adapters(own)
        self._adapters = StepAdapters(slots, store.content, self._device)
        return slots

    def _hold(
        self, model: CausalLM, draft: CausalLM | None = None, head: DraftHead | None = None
    ) -> None:
        """Take a model and its draft model, whose layers have no cache yet.

        Args:
            head: of the model, if that has been built.

        Raises:
            UnsupportedFeature: the draft model's layers do not keep what they saw.
        """
        self._model, self._draft = model, draft
        self._layers = model.attention_layers()
        if draft is not None:
            self._layers = {**self._layers, **draft_layers(draft)}
        if head is None and self._settings.drafts.build_head is not None:
            with memory_errors("the weights of the part that guesses"):
                head = self._settings.drafts.build_head(model, self._path)
        self._head = head
        if head is not None:
            self._layers = {**self._layers, **draft_layers(head)}
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

        On a CPU it is run only if it is small (:mod:`~headrace_engine.execution.measuring.largest`); a
        larger one is reckoned from one prompt of that length, for what grows with the tokens, and
        one step of that many requests, for what grows with the rows that are sampled.

        ``activations``: on CUDA the growth of torch's peak of allocated memory; on a CPU the
        growth of the process's resident set (the kernel's high-water mark, reset before), which
        counts only what the step needs beyond memory that the process already holds, and is never
        less than the step's logits take. ``weights``: what loading added to the same measure, and
        at least the size of the model's parameters if it is a ``torch.nn.Module``.
        ``available``: free before loading. ``step_seconds``: the same step's time.
        Where requests bring media, what the most of them that a step can hold take is added to both.

        What an earlier start of the same has measured is taken instead
        (:mod:`~headrace_engine.execution.measuring.kept_costs`), but for ``weights`` and ``available``.
        """
        settings, limits, kept = self._settings, self._limits, self._settings.kept_costs
        cost = None if kept is None else kept.find()
        if cost is None:
            cost = self._measure_largest()
            if kept is not None:
                kept.keep(cost)
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        logits = 0 if settings.pooling is not None else 4 * limits.vocab_size * rows
        guesses = self._draft is not None or self._head is not None
        activations = max(cost.activations, logits)
        activations += captured_bytes(
            settings.capture,
            limits,
            recordings=1 + (self._adapters is not None) + guesses,
            activations=activations,
            logits=logits,
        )
        self._activations = activations + cost.media
        seconds = cost.seconds + cost.media_seconds
        return MemoryProfile(self._weights, self._activations, self._available, seconds)

    def _measure_largest(self) -> StepCost:
        """Of a step, and of the media of one."""
        limits, make_items = self._limits, self._settings.media.largest
        largest = LargestStep(
            self._dummy_steps(), self._meter, limits.max_num_batched_tokens, limits.max_num_seqs
        )
        activations, seconds = largest.measure(whole=self._device.type != "cpu")
        items = make_items() if make_items is not None else ()
        media, media_seconds = largest.measure_media(items)
        self._meter.trim()
        return StepCost(activations, seconds, media, media_seconds)

    def allocate_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache of this rank's layers, bind it to them, and get ready for steps."""
        config = of_layers(config, self.kv_specs())
        backends = group_backends(self._layers, config)
        size = readable(config.num_bytes)
        with memory_errors(f"a KV cache of {size}"), self._memory.region(KV_CACHE):
            self._buffers = bind_cache(self._layers, self._states, config, self._device)
        self._cache = config
        if self._device.type == "cpu":
            self._populators = list(self._make_populators(config))
        if self._settings.sampling.grammars is not None:
            self._constraints = ConstraintMaker(self._settings.sampling.grammars)
        self._make_runner(config, backends)

    def _make_runner(
        self, config: KVCacheConfig, backends: Sequence[AttentionBackend | None]
    ) -> None:
        """A runner of the model as it is now, whose layers have their cache."""
        self._runner = self._runner_class()(
            self._loaded(),
            backends,
            config,
            device=self._device,
            vocab_size=self._limits.vocab_size,
            sampler=self._sampler,
            seed=self._settings.sampling.seed,
            populators=self._populators,
            constraints=self._constraints,
            processors=self._processors,
            token_types=self._settings.takes_token_types,
            max_media_vectors=self._settings.media.max_vectors,
            transfer=self._transfer,
            make_ahead=None if self._settings.media.slices is None else self._make_ahead,
            adapters=self._adapters,
        )
        self._runner.launching = self._launching
        if self._settings.transfer.connector is not None:
            self._parts = self._settings.transfer.divide_blocks(self._layers, config)
            self._mover = BlockMover(
                self._settings.transfer.connector,
                self._buffers,
                config,
                splits_of_groups(self._layers, config, self._parts),
                self._parts,
                None if self._ranks.leader is None else self._ranks.leader.call,
            )
        self._draft_proposer = let_guess(
            self._runner, config, self._loaded(),
            draft=self._draft, head=self._head, settings=self._settings, sampler=self._sampler,
        )  # fmt: skip

    def _make_ahead(self, embed: Callable[[MediaInput], Tensor]) -> VectorsAhead:
        media = self._settings.media
        assert media.slices is not None
        return VectorsAhead(
            embed, media.slices, media.encoder_share, self._limits.max_num_batched_tokens
        )

    def _runner_class(self) -> type[ModelRunner]:
        if self._transfer is not None and self._transfer.is_producer:
            return EncodingRunner
        if self._settings.pooling is not None:
            return PoolingRunner
        return StagedRunner if isinstance(self._loaded(), LaunchesPasses) else ModelRunner

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Measure the cache's scales, if asked to. Run made-up steps, writing to no block, and capture
        steps; then begin to make the cache's memory resident."""
        self._try_and_capture()
        for populator in self._populators:
            populator.start()
        self._binding.narrow()
        if self._ranks.experts is not None:
            self._ranks.experts.begin_serving()
        if self._ranks.watcher is not None:
            self._ranks.watcher.begin()

    def _try_and_capture(self) -> None:
        """The steps of :meth:`warm_up`."""
        if self._settings.kv_scales is not None:  # first: recordings hold scales as constants
            self._measure_kv_scales(self._settings.kv_scales)
        self._settle_and_record()

    def _settle_and_record(self) -> None:
        """Run dummy steps, then capture steps."""
        tokens, seqs = self._limits.max_num_batched_tokens, self._limits.max_num_seqs
        capture, dummy = self._settings.capture, self._dummy_steps()
        is_cpu = self._device.type == "cpu"
        many = min(seqs, WARM_UP_SEQS) if is_cpu else seqs
        # Each step reads all weights, a tenth of a second for a billion bytes, and samples of the vocabulary
        # for each request. Where steps are recorded, one of a request that decodes and of a prompt makes
        # whatever a model makes when it first runs.
        is_brief = is_cpu and capture is not None and capture.largest > 0
        if is_brief:
            dummy.run(min(3, tokens), min(2, seqs))
        else:
            self._run_each_kind(dummy, many)
        self._record()
        if is_brief and self._ready().graph is None:  # refused: steps run as these do
            self._run_each_kind(dummy, many)

    def _run_each_kind(self, dummy: DummySteps, seqs: int) -> None:
        """A decode step of one and of many requests, and a prompt."""
        tokens = self._limits.max_num_batched_tokens
        dummy.run(1, 1)
        dummy.run(min(seqs, tokens), seqs)
        dummy.run(min(self._ready().block_size or WARM_UP_SEQS, tokens), 1)

    def _record(self) -> None:
        """Capture steps, if they are to be."""
        tokens = self._limits.max_num_batched_tokens
        if self._settings.capture is not None:
            runner, cache, all_rows, parts = self._ready(), self._cache, False, False
            assert cache is not None
            all_rows = runner.tap is not None
            if isinstance(runner, PoolingRunner):
                assert self._settings.pooling is not None
                parts = not runner.backends
                all_rows = runner.all_rows = needs_all_rows(runner.model, self._settings.pooling)
            record = step_recorder(self._settings, runner, cache, all_rows)
            if self._ranks.leader is None:
                runner.graph = runner.record(record, parts=parts)
            else:  # each rank records its own steps; a step in parts has no order for exchanges
                with self._ranks.leader.alone():
                    runner.graph = record_together(self._ranks.experts, runner, record)
                self._ranks.leader.lead_replays(runner.graph)
            if self._draft_proposer is not None:
                like = torch.empty(
                    0, dtype=getattr(torch, self._settings.dtype), device=self._device
                )
                self._draft_proposer.capture(record, self._settings.capture.largest, like)
            if self._adapters is not None and not meets_engines(self._ranks.experts):
                with nullcontext() if self._ranks.leader is None else self._ranks.leader.alone():
                    self._adapters.choose_all(tokens, tokens)
                    runner.adapter_graph = runner.record(record, kind="steps with adapters")
                    self._adapters.choose_none()
                if self._ranks.leader is not None:
                    self._ranks.leader.lead_replays(runner.adapter_graph)

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step, then a slice of what is embedded beside steps."""
        begin = time.perf_counter()
        if self._ranks.leader is not None and step.num_scheduled_tokens:
            self._ranks.leader.expect()
        if not self._profiler.armed:
            result = self._run(step)
        else:
            with self._profiler.step():
                result = self._run(step)
        if self._ranks.watcher is not None and step.num_scheduled_tokens:
            with torch.inference_mode():
                self._ranks.watcher.after_step()
        if self._settings.media.slices is not None or step.media_ahead:
            vectors, seconds = self._ready().media_vectors, time.perf_counter() - begin
            result.embedded = vectors.work_ahead(step.media_ahead, seconds)
        return result

    @torch.inference_mode()
    def take_part(self) -> bool:
        """Run an empty pass: compute for engines that share this one's experts. False: they have nothing to
        run either."""
        ran: bool = self._ranks.experts.take_part()
        if ran and self._ranks.watcher is not None:
            self._ranks.watcher.after_step()
        return ran

    @torch.inference_mode()
    def take_leave(self) -> bool:
        """As :meth:`take_part`, of an engine that is to end. True: all others are, too, and wait for it no
        longer."""
        may_leave: bool = self._ranks.experts.take_leave()
        return may_leave

    def _run(self, step: ScheduledStep) -> StepResult:
        runner = self._ready()
        if self._mover is None or step.connector_metadata is None:
            return runner.execute(step)
        return self._mover.run(step.connector_metadata[MOVES], partial(runner.execute, step))

    def when_launching(self, call: Callable[[], None]) -> None:
        """See :meth:`headrace_core.executor.Worker.when_launching`."""
        self._launching = call
        if self._runner is not None:
            self._runner.launching = call

    @property
    def rank(self) -> int:
        """Its place among the workers."""
        return self._ranks.rank

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
            "dtype": self._settings.dtype,
            "num_threads": torch.get_num_threads(),
            "weights_bytes": 0 if self._model is None else self._weights,
            "activations_bytes": self._activations,
            "cache_bytes": sum(tensor.nbytes for pool in self._buffers for tensor in pool),
            "torch": str(torch.__version__),
            "kernels": _kernels(self._settings.ops),
            **self._layout_report(),
            "batch_invariant": self._settings.ops.row_invariant,
            **({} if self._ranks.report_group is None else self._ranks.report_group()),
            **self._media_report(),
        }

    def _layout_report(self) -> dict[str, Any]:
        """How blocks lie in memory, and this rank's parts of them; an empty text without blocks."""
        if self._cache is None or not self._layers:  # an engine that sleeps has no layers
            return {"kv_layout": ""}
        backends = group_backends(self._layers, self._cache)
        parts = self._parts or [GroupParts()] * len(self._cache.groups)
        ops = self._settings.ops
        facts = (ops.vnni_packed, _kernels(ops), self._device.type)
        found: dict[str, Any] = {"kv_layout": layout_of_rank(backends, self._cache, parts, facts)}
        if self._mover is not None:
            found["kv_group_layouts"] = layouts_of_groups(backends, self._cache, parts, facts)
            found["kv_parts"] = self._mover.part_sizes
        return found

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

    def close(self) -> None:
        """Free model, cache and requests. Idempotent."""
        self._free()
        if self._ranks.leave_group is not None:
            self._ranks.leave_group()
        self._processors = None
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        if self._settings.transfer.connector is not None:
            self._settings.transfer.connector.close()
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
        close_runner(self._runner, self._draft_proposer)
        self._adapters = self._draft_proposer = None
        unbind(self._layers, self._states)
        self._layers, self._states = {}, {}
        self._model = self._draft = self._runner = self._cache = self._head = None
        self._mover, self._parts = None, ()
        self._buffers = []
        self._memory.forget()
        # A runner and its parts refer to one another. Gigabytes of weights cannot wait until Python looks for
        # such circles, which it does by the number of objects: the next engine would find no room.
        gc.collect()

    def _make_populators(self, config: KVCacheConfig) -> Iterator[CachePopulator]:
        """One for each pool, with its share of what is to be resident ahead of use."""
        for pool, (buffers, num_blocks) in enumerate(zip(self._buffers, config.pools)):
            ahead = self._settings.cache_ahead_bytes
            if ahead != WHOLE:
                ahead = ahead * num_blocks * config.block_bytes(pool) // max(1, config.num_bytes)
            yield CachePopulator(buffers, num_blocks, ahead, torch.get_num_threads())

    def _measure_kv_scales(self, constants: ScaleConstants) -> None:
        model, runner, cache = self._loaded(), self._ready(), self._cache
        assert cache is not None
        one_byte_layers(self._layers)  # before a prompt is laid out in blocks that there are not
        batch, blocks = measuring_batch(
            cache,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_model_len,
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
            pooling=self._settings.pooling,
            max_num_seqs=self._limits.max_num_seqs,
            max_model_len=self._limits.max_model_len,
            device=self._device,
            cache=self._cache,
            runner=self._runner,
            adapters=self._adapters,
        )

    def _loaded(self) -> CausalLM:
        if self._model is None:
            raise ModelError(
                "the worker has no model: load() has not been called, or close() or sleep has"
            )
        return self._model

    def _ready(self) -> ModelRunner:
        self._loaded()
        if self._runner is None:
            raise ModelError("the worker has no cache: allocate_cache() has not been called")
        return self._runner


def _kernels(ops: OpTable) -> list[str]:
    """Names of the providers whose kernels are in use, sorted."""
    return sorted(set(ops.providers.values()))


def close_runner(runner: ModelRunner | None, proposer: ModelProposer | None) -> None:
    """Let go of a runner's recordings, and of what it keeps of media."""
    if runner is None:
        return
    runner.media_vectors.clear()
    drafts = None if proposer is None else proposer.graph
    for graph in (runner.graph, runner.adapter_graph, drafts):
        if graph is not None:
            graph.close()


def _takes_prompt_embeds(model: CausalLM) -> bool:
    """True if prompts may be vectors: not if the model's layers look up tokens' ids themselves, which it
    says by an attribute ``reads_ids`` (Gemma 3n)."""
    return isinstance(model, SupportsPromptEmbeds) and not getattr(model, "reads_ids", False)


def _parameter_bytes(model: CausalLM) -> int:
    if not isinstance(model, torch.nn.Module):
        return 0
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
