"""The worker that owns a model, its cache and its requests on one device."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace_core.attention import AttentionBackend
from headrace_core.errors import ConfigError, ModelError
from headrace_core.executor import MemoryProfile
from headrace_core.graph import StepGraph
from headrace_core.kv import CacheSpec, KVCacheConfig, KVConnector
from headrace_core.lora import AdapterSlots
from headrace_core.model import (
    AttentionLayer,
    CausalLM,
    DividesVocabulary,
    LaunchesPasses,
    StateLayer,
    SupportsPooling,
    SupportsPromptEmbeds,
    SupportsRecurrence,
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
    unbind,
)
from headrace_engine.execution.capture import Capture, capture_steps
from headrace_engine.execution.dummy import DummySteps
from headrace_engine.execution.kv_scales import (
    measure_kv_scales,
    measuring_batch,
    one_byte_layers,
)
from headrace_engine.execution.measuring.kept_costs import KeptCosts, StepCost
from headrace_engine.execution.measuring.largest import LargestItem, LargestStep
from headrace_engine.execution.measuring.measure import MemoryMeter, memory_meter
from headrace_engine.execution.memory import readable
from headrace_engine.execution.pooling import PoolingRunner, needs_all_rows
from headrace_engine.execution.populate import WHOLE, CachePopulator
from headrace_engine.execution.profiling import StepProfiler
from headrace_engine.execution.refusal import memory_errors
from headrace_engine.execution.requests import RequestTable
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.execution.scale_constants import ScaleConstants
from headrace_engine.kv.grouping import of_layers
from headrace_engine.kv.spare_states import spare_states
from headrace_engine.kv.states import state_groups
from headrace_engine.kv_transfer.moves import MOVES
from headrace_engine.kv_transfer.parts import GroupParts, parts_of_groups, whole_spec
from headrace_engine.kv_transfer.worker import BlockMover, splits_of_groups
from headrace_engine.lockstep.graph import LockstepGraph
from headrace_engine.lora.step_adapters import StepAdapters
from headrace_engine.lora.store import AdapterStore
from headrace_engine.multiproc.staged import StagedRunner
from headrace_engine.sampling.processors import ProcessorStage
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sleep.engine_sleep import KV_CACHE, WEIGHTS
from headrace_engine.sleep.memory import SleepingMemory
from headrace_engine.sleep.memory_pool import MemoryPool
from headrace_engine.speculation.config import SpeculativeConfig
from headrace_engine.speculation.draft_context import DraftContext
from headrace_engine.speculation.draft_head import BuildHead, DraftHead
from headrace_engine.speculation.draft_model import DraftModelProposer, draft_layers
from headrace_engine.speculation.head import HeadProposer
from headrace_engine.speculation.state_turns import StateTurns
from headrace_engine.structured.matching import ConstraintMaker
from headrace_engine.structured.store import GrammarStore

logger = logging.getLogger(__name__)

WARM_UP_SEQS = 16
"""Requests of the largest warm-up step on a CPU, where nothing is compiled or sized for more."""


class LeadsPasses(Protocol):
    """Makes passes of rank 0 run on every rank."""

    def lead(self, model: Any) -> None:
        """Those of a model or of its experts, from now on."""
        ...

    def lead_replays(self, graph: StepGraph | None) -> None:
        """Those that are recorded."""
        ...

    def lead_adapters(self, slots: AdapterSlots) -> AdapterSlots:
        """Slots that tell the other ranks what they are told."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """None, while this lasts."""
        ...

    def call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        """Call a method of the other ranks' workers, after the passes until now; results by rank from 1."""
        ...


DividesBlocks = Callable[[Mapping[str, AttentionLayer], KVCacheConfig], Sequence[GroupParts]]
"""Says for layers of a rank and their cache which parts of blocks it has, by cache group."""


class WatchesSteps(Protocol):
    """Does something between steps."""

    def begin(self) -> None:
        """The next step is the first with requests."""
        ...

    def after_step(self) -> None:
        """A step of requests has run."""
        ...


class ServingWorker:
    """Computes steps with a model on one device. One thread only. With weights that may change it is a
    :class:`~headrace_engine.weights.worker.ModelWorker`.

    Args:
        build_model: builds and loads the model, given the slots of ``make_adapters`` if there is that;
            called once, by :meth:`load`.
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
        make_transfer: makes the worker's end of a disaggregated encoder; None: there is none.
        connector: has blocks that are outside the cache, and gets some; None: there are none.
        divide_blocks: says which parts of blocks this rank has.
        slices: where towers pause; None: nothing is embedded beside steps.
        encoder_share: seconds of that for each second of steps.
        speculative: who guesses tokens that steps check besides; None: nobody.
        build_draft: builds and loads the model that guesses; None: none does.
        draft_max_len: its longest context.
        build_head: builds what guesses by the model's hidden states; None: nothing does.
        make_adapters: makes the slots of a model's adapters; None: requests have none.
        adapter_store: has the adapters, and reads them for the model.
        memory_pool: holds weights and cache of an engine that may sleep, if the device has such memory.
        rank: its place among the ranks over which the model's layers are divided.
        memory_share: ranks that share the device's memory, this one included.
        leader: makes passes of the model run on the other ranks, too; None: there are none, or this rank
            follows.
        leave_group: ends exchanges with the other ranks; None: there are none.
        report_group: facts about those exchanges, as plain data.
        experts: whole experts that move between ranks by ``arrange_experts``, and compute for other engines
            by ``take_part``; None: there are none.
        watcher: is told of steps; None: nobody is.
        kept_costs: has what an earlier start of the same measured; None: every start measures.
    """

    def __init__(
        self,
        build_model: Callable[..., CausalLM],
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
        make_transfer: Callable[[], EncoderTransfer] | None = None,
        connector: KVConnector | None = None,
        divide_blocks: DividesBlocks = parts_of_groups,
        slices: EncoderSlices | None = None,
        encoder_share: float = 0.0,
        speculative: SpeculativeConfig | None = None,
        build_draft: Callable[[], CausalLM] | None = None,
        draft_max_len: int = 0,
        build_head: BuildHead | None = None,
        make_adapters: Callable[[], AdapterSlots] | None = None,
        adapter_store: AdapterStore | None = None,
        memory_pool: MemoryPool | None = None,
        rank: int = 0,
        memory_share: int = 1,
        leader: LeadsPasses | None = None,
        leave_group: Callable[[], None] | None = None,
        report_group: Callable[[], Mapping[str, str]] | None = None,
        experts: Any = None,
        watcher: WatchesSteps | None = None,
        kept_costs: KeptCosts | None = None,
    ) -> None:
        self._build_model = build_model
        self._rank = rank
        self._memory_share = memory_share
        self._leader = leader
        self._leave_group, self._report_group = leave_group, report_group
        self._experts, self._watcher = experts, watcher
        self._kept_costs = kept_costs
        self._device = torch.device(device)
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._kernels = sorted(set(ops.providers.values()))
        self._batch_invariant = ops.row_invariant
        self._vnni_packed = ops.vnni_packed
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
        self._make_transfer = make_transfer
        self._connector, self._divide_blocks = connector, divide_blocks
        self._mover: BlockMover | None = None
        self._parts: Sequence[GroupParts] = ()
        self._slices = slices
        self._encoder_share = encoder_share
        self._build_draft = build_draft
        self._draft_max_len = draft_max_len
        self._draft: CausalLM | None = None
        self._build_head = build_head
        self._head: DraftHead | None = None
        self._path: str | None = None
        """Of the checkpoint that serves, if it is another than at the start."""
        self._draft_proposer: DraftModelProposer | HeadProposer | None = None
        self._speculative = speculative or SpeculativeConfig()
        self._make_adapters = make_adapters
        self._adapter_store = adapter_store
        self._memory = SleepingMemory(memory_pool)
        self._adapters: StepAdapters | None = None
        self._transfer: EncoderTransfer | None = None
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
        self._available = self._meter.available() // self._memory_share
        before = self._meter.used()
        with memory_errors("the model's weights"), self._memory.region(WEIGHTS):
            slots = self._make_slots()
            model = self._build_model(*slots)
            draft = None if self._build_draft is None else self._build_draft()
        if self._leader is not None:
            self._leader.lead(model)
            self._leader.lead(self._experts)
        self._hold(model, draft)
        if self._prompt_embeds and not _takes_prompt_embeds(model):
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
        known = _parameter_bytes(model) + sum(one.num_bytes for one in slots)
        self._weights = max(self._meter.used() - before, known)
        logger.info(
            "model loaded on %s in %s: %.1f MiB", self._device, self._dtype, self._weights / 2**20
        )

    def _make_slots(self) -> tuple[AdapterSlots, ...]:
        """The slots of a model that is built next, if it is to have any."""
        if self._make_adapters is None:
            return ()
        assert self._adapter_store is not None
        own = self._make_adapters()
        slots = own if self._leader is None else self._leader.lead_adapters(own)
        self._adapter_store.bind(slots)
        self._adapters = StepAdapters(slots, self._adapter_store.content, self._device)
        return (own,)

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
        if head is None and self._build_head is not None:
            with memory_errors("the weights of the part that guesses"):
                head = self._build_head(model, self._path)
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
        cost = None if self._kept_costs is None else self._kept_costs.find()
        if cost is None:
            cost = self._measure_largest()
            if self._kept_costs is not None:
                self._kept_costs.keep(cost)
        rows = min(self._max_num_seqs, self._max_num_batched_tokens)
        logits = 0 if self._pooling is not None else 4 * self._vocab_size * rows
        activations = max(cost.activations, logits)
        activations += self._captured_bytes(activations, logits)
        self._activations = activations + cost.media
        seconds = cost.seconds + cost.media_seconds
        return MemoryProfile(self._weights, self._activations, self._available, seconds)

    def _measure_largest(self) -> StepCost:
        """Of a step, and of the media of one."""
        largest = LargestStep(
            self._dummy_steps(), self._meter, self._max_num_batched_tokens, self._max_num_seqs
        )
        activations, seconds = largest.measure(whole=self._device.type != "cpu")
        items = self._largest_media() if self._largest_media is not None else ()
        media, media_seconds = largest.measure_media(items)
        self._meter.trim()
        return StepCost(activations, seconds, media, media_seconds)

    def _captured_bytes(self, activations: int, logits: int) -> int:
        """Bytes that captured steps will hold besides: their share of the largest step's activations,
        and logits, also in the activations' dtype, of as many rows as that share samples."""
        if self._capture is None or not self._capture.largest:
            return 0
        recordings = (
            1 + (self._adapters is not None) + (self._draft is not None or self._head is not None)
        )
        share = recordings * self._capture.largest / self._max_num_batched_tokens
        rows = recordings * min(1.0, self._capture.largest / self._max_num_seqs)
        return int(share * activations + 2 * rows * logits)

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
        if self._grammars is not None:
            self._constraints = ConstraintMaker(self._grammars)
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
            adapters=self._adapters,
        )
        self._runner.launching = self._launching
        if self._connector is not None:
            self._parts = self._divide_blocks(self._layers, config)
            self._mover = BlockMover(
                self._connector,
                self._buffers,
                config,
                splits_of_groups(self._layers, config, self._parts),
                self._parts,
                None if self._leader is None else self._leader.call,
            )
        self._guess(self._runner)

    def _guess(self, runner: ModelRunner) -> None:
        """Let a new runner have guesses, if there are to be any."""
        made: DraftModelProposer | HeadProposer | None = None
        max_len = self._max_model_len if self._draft is None else self._draft_max_len
        context = DraftContext(
            runner.requests, runner.with_metadata, self._sampler, runner.block_size, self._device, max_len
        )  # fmt: skip
        if self._draft is not None:
            made = DraftModelProposer(self._draft, context)
        elif self._head is not None:
            made = HeadProposer(self._head, context, self._led_methods(self._head))
        if made is not None:
            runner.requests.follow(made)
        self._draft_proposer = made
        proposer = made or self._speculative.make_proposer()
        if proposer is not None:
            runner.guess_by(
                proposer,
                adapts=self._speculative.adaptive,
                takes_time=made is not None,
                turns=self._state_turns(runner.requests),
            )

    def _led_methods(self, head: DraftHead) -> frozenset[str]:
        """Methods of a head that are the model's, and in which other ranks take part."""
        model = self._loaded()
        if self._leader is None or not isinstance(model, DividesVocabulary):
            return frozenset()
        return frozenset(head.target_methods).intersection(model.vocabulary_passes)

    def _state_turns(self, table: RequestTable) -> StateTurns | None:
        """Where states are while guesses are checked, if layers have any."""
        assert self._cache is not None
        if not state_groups(self._cache):
            return None
        count = spare_states(self._speculative.num_drafts, self._max_num_seqs)
        return StateTurns(table, self._cache, count)

    def _make_ahead(self, embed: Callable[[MediaInput], Tensor]) -> VectorsAhead:
        assert self._slices is not None
        return VectorsAhead(embed, self._slices, self._encoder_share, self._max_num_batched_tokens)

    def _runner_class(self) -> type[ModelRunner]:
        if self._transfer is not None and self._transfer.is_producer:
            return EncodingRunner
        if self._pooling is not None:
            return PoolingRunner
        return StagedRunner if isinstance(self._loaded(), LaunchesPasses) else ModelRunner

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Measure the cache's scales, if asked to. Run a decode step of one and of many requests,
        and a prompt, writing to no block; then capture steps, and begin to make the cache's memory
        resident."""
        self._try_and_capture()
        for populator in self._populators:
            populator.start()
        self._binding.narrow()
        if self._experts is not None:
            self._experts.begin_serving()
        if self._watcher is not None:
            self._watcher.begin()

    def _try_and_capture(self) -> None:
        """The steps of :meth:`warm_up`."""
        if self._kv_scales is not None:  # first: recordings hold scales as constants
            self._measure_kv_scales(self._kv_scales)
        self._settle_and_record()

    def _settle_and_record(self) -> None:
        """Run dummy steps, then capture steps."""
        tokens, seqs = self._max_num_batched_tokens, self._max_num_seqs
        prompt = self._ready().block_size or WARM_UP_SEQS
        dummy = self._dummy_steps()
        dummy.run(1, 1)
        many = min(seqs, WARM_UP_SEQS) if self._device.type == "cpu" else seqs
        dummy.run(min(many, tokens), many)
        dummy.run(min(prompt, tokens), 1)
        if self._capture is not None:
            runner, cache, all_rows, parts = self._ready(), self._cache, False, False
            assert cache is not None
            all_rows = runner.tap is not None
            if isinstance(runner, PoolingRunner):
                assert self._pooling is not None
                parts = not runner.backends
                all_rows = runner.all_rows = needs_all_rows(runner.model, self._pooling)
            record = partial(
                capture_steps,
                self._capture,
                max_num_seqs=seqs + self._meets_engines,  # one that fills a batch up
                num_groups=len(runner.backends),
                device=self._device.type,
                all_rows=all_rows,
                token_types=self._takes_token_types,
                cross_groups=tuple(cross_groups(cache)),
                state_groups=tuple(state_groups(cache)),
            )
            if self._leader is None:
                runner.graph = record(runner.whole_step, parts=parts)
            else:  # each rank records its own steps; a step in parts has no order for exchanges
                with self._leader.alone():
                    runner.graph = self._record_together(runner, record)
                self._leader.lead_replays(runner.graph)
            if self._draft_proposer is not None:
                like = torch.empty(0, dtype=getattr(torch, self._dtype), device=self._device)
                self._draft_proposer.capture(record, self._capture.largest, like)
            if self._adapters is not None and not self._meets_engines:
                with nullcontext() if self._leader is None else self._leader.alone():
                    self._adapters.choose_all(tokens, tokens)
                    runner.adapter_graph = record(runner.whole_step, kind="steps with adapters")
                    self._adapters.choose_none()
                if self._leader is not None:
                    self._leader.lead_replays(runner.adapter_graph)

    @property
    def _meets_engines(self) -> bool:
        """True if passes are those of several engines, which share experts."""
        return self._experts is not None and bool(self._experts.meets_engines)

    def _record_together(
        self, runner: ModelRunner, record: Callable[..., StepGraph | None]
    ) -> StepGraph | None:
        """Steps of this rank, recorded: to be replayed together with those of other ranks or engines."""
        if not self._meets_engines:
            return record(runner.whole_step)
        with self._experts.recording():
            graph = record(runner.whole_step)
        if graph is None:
            return None
        return LockstepGraph(graph, self._experts, runner.whole_step, runner.block_size)

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step, then a slice of what is embedded beside steps."""
        begin = time.perf_counter()
        if not self._profiler.armed:
            result = self._run(step)
        else:
            with self._profiler.step():
                result = self._run(step)
        if self._watcher is not None and step.num_scheduled_tokens:
            with torch.inference_mode():
                self._watcher.after_step()
        if self._slices is not None or step.media_ahead:
            vectors, seconds = self._ready().media_vectors, time.perf_counter() - begin
            result.embedded = vectors.work_ahead(step.media_ahead, seconds)
        return result

    @torch.inference_mode()
    def take_part(self) -> bool:
        """Run an empty pass: compute for engines that share this one's experts. False: they have nothing to
        run either."""
        ran: bool = self._experts.take_part()
        if ran and self._watcher is not None:
            self._watcher.after_step()
        return ran

    @torch.inference_mode()
    def take_leave(self) -> bool:
        """As :meth:`take_part`, of an engine that is to end. True: all others are, too, and wait for it no
        longer."""
        may_leave: bool = self._experts.take_leave()
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
        return self._rank

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
            "weights_bytes": 0 if self._model is None else self._weights,
            "activations_bytes": self._activations,
            "cache_bytes": sum(tensor.nbytes for pool in self._buffers for tensor in pool),
            "torch": str(torch.__version__),
            "kernels": self._kernels,
            "kv_layout": self._kv_layout(),
            "batch_invariant": self._batch_invariant,
            **({} if self._report_group is None else self._report_group()),
            **({"kv_parts": [tuple(own) for own in self._parts]} if self._parts else {}),
            **self._media_report(),
        }

    def _kv_layout(self) -> str:
        """How blocks lie in memory: equal texts, equal bytes of equal content, whatever the number of ranks;
        "" without blocks."""
        if self._cache is None or not self._layers:  # an engine that sleeps has no layers
            return ""
        backends = group_backends(self._layers, self._cache)
        orders = [one and (one.name, tuple(one.cache_stride_order())) for one in backends]
        parts = self._parts or [GroupParts()] * len(self._cache.groups)
        specs = [
            (group.layer_names, whole_spec(group.spec, own))
            for group, own in zip(self._cache.groups, parts)
        ]
        return repr((orders, specs, self._vnni_packed, self._kernels, self._device.type))

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
        if self._leave_group is not None:
            self._leave_group()
        self._processors = None
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        if self._connector is not None:
            self._connector.close()
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
        self._model = self._runner = self._cache = self._head = None
        self._mover, self._parts = None, ()
        self._buffers = []
        self._memory.forget()

    def _make_populators(self, config: KVCacheConfig) -> Iterator[CachePopulator]:
        """One for each pool, with its share of what is to be resident ahead of use."""
        for pool, (buffers, num_blocks) in enumerate(zip(self._buffers, config.pools)):
            ahead = self._cache_ahead_bytes
            if ahead != WHOLE:
                ahead = ahead * num_blocks * config.block_bytes(pool) // max(1, config.num_bytes)
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
            adapters=self._adapters,
        )

    @property
    def _takes_token_types(self) -> bool:
        return self._pooling is not None and self._pooling.token_types

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


def close_runner(
    runner: ModelRunner | None, proposer: DraftModelProposer | HeadProposer | None
) -> None:
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
