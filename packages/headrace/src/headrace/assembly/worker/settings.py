"""From the resolved configuration to everything that one rank's worker is told."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.assembly.beside import BesideBuilder, resolved_beside
from headrace.assembly.drafts.head import has_head, head_builder, is_within
from headrace.assembly.drafts.model import draft_model
from headrace.assembly.logits_processors import named_processors
from headrace.assembly.media import largest_media
from headrace.assembly.named import kv_scale_constants
from headrace.assembly.parallel.eager_passes import undivided_graphs
from headrace.assembly.parallel.experts import divided_experts
from headrace.assembly.parallel.prefill_context import divided_pass
from headrace.assembly.plugged import logits_processors
from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.speech.transcription import model_class
from headrace.assembly.start_costs import kept_costs
from headrace.assembly.transfer.encoder import transfer_maker
from headrace.assembly.transfer.kv import block_divider
from headrace.assembly.worker.model import adapter_slots, build_model, without_weights
from headrace.assembly.worker.ops import choose_ops, cpu_threads
from headrace_core import plugins
from headrace_core.model import CausalLM
from headrace_engine.config import capture_sizes
from headrace_engine.worker.settings import (
    AdapterSettings,
    AheadBytes,
    BlockTransferSettings,
    DraftSettings,
    LeadsPasses,
    MediaSettings,
    RankSettings,
    SamplingSettings,
    WeightSettings,
    WorkerLimits,
    WorkerSettings,
)

if TYPE_CHECKING:
    import torch

    from headrace.assembly.parallel.ranks import Ranks
    from headrace_core.kv import KVConnector
    from headrace_core.lora import AdapterSlots
    from headrace_core.sampling.logits_processor import LogitsProcessor
    from headrace_engine.encoder.slices import EncoderSlices
    from headrace_engine.execution.capture import Capture
    from headrace_engine.lockstep.peers import PeerEngines
    from headrace_engine.lora.store import AdapterStore
    from headrace_engine.sleep.memory_pool import MemoryPool
    from headrace_engine.startup import StartupTimeline
    from headrace_engine.structured.store import GrammarStore
    from headrace_models.loading.ahead.weights import WeightsAhead

MEMORY_POOLS = "headrace.memory_pools"


class RankSetup:
    """What is known of a rank's worker before it is made: all that a configuration can get wrong is refused
    here. :meth:`make` does the rest, in the thread and process in which the worker lives.

    Args:
        resolved: the model.
        ranks: the rank's place among the others.
        ahead: weights that are packed already, for the model that is built first; None: there are none.

    Raises:
        ConfigError: a setting cannot be used here.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        timeline: StartupTimeline,
        ranks: Ranks,
        ahead: WeightsAhead | None = None,
    ) -> None:
        scheduler, graph = resolved.config.scheduler, resolved.config.graph
        assert scheduler.max_num_batched_tokens is not None
        assert scheduler.max_num_seqs is not None
        self.resolved, self.timeline, self.ranks = resolved, timeline, ranks
        self.ahead = ahead
        self.limits = WorkerLimits(
            vocab_size=resolved.info.vocab_size,
            max_model_len=resolved.info.max_model_len,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
        )
        self.capture_sizes = capture_sizes(
            graph.cudagraph_capture_sizes,
            graph.max_cudagraph_capture_size,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        self.threads = ranks.threads(cpu_threads(resolved))
        self.kv_scales = kv_scale_constants(resolved.config.cache, os.environ)
        self.make_processors = processor_maker(resolved, timeline)
        self.draft = draft_model(resolved)

    def make(self, peers: PeerEngines | None) -> RankParts:
        """Choose the kernels, and get ready to build the model.

        Args:
            peers: engines with which this one shares experts; None: there are none, or the rank is not 0.
        """
        self.ranks.use_device(self.resolved.platform.device)
        return RankParts(self, peers)


class RankParts:
    """One rank's kernels, and what builds its model with them. Made by :meth:`RankSetup.make`."""

    def __init__(self, setup: RankSetup, peers: PeerEngines | None) -> None:
        from headrace_engine.weights.holder import WeightHolder

        resolved, ranks = setup.resolved, setup.ranks
        self._setup, self._resolved, self._ranks = setup, resolved, ranks
        ops = self._ops = choose_ops(resolved, setup.timeline, setup.threads)
        slices = self._slices = None if ranks.are_several else encoder_slices(resolved)
        tokens = setup.limits.max_num_batched_tokens
        self._experts = divided_experts(resolved.config.parallel, ranks, tokens)
        self._beside = BesideBuilder(
            resolved, ops, slices, ranks,
            lambda: divided_experts(resolved.config.parallel, ranks, tokens), self._experts,
        )  # fmt: skip
        if self._experts is not None and peers is not None:
            self._experts.waves = peers.waves
        self._weights = WeightHolder(
            lambda slots=None: without_weights(resolved, ops, slices, slots, ranks, self._experts),
            within=is_within(resolved.config) and ranks.rank == 0,
        )

    def following(self, connector: KVConnector | None) -> WorkerSettings:
        """Settings of a rank other than 0."""
        resolved = self._resolved
        slots = self._make_slots if resolved.config.lora.enable_lora else None
        return dataclasses.replace(
            self._of_rank(connector, has_inputs=self._ranks.stage == 0),
            drafts=DraftSettings(reads_states=has_head(resolved.config, resolved.info)),
            adapters=AdapterSettings(make_slots=slots),
            weights=self._changing_weights(),
        )

    def serving(
        self,
        connector: KVConnector | None,
        leader: LeadsPasses | None,
        grammars: GrammarStore | None,
        adapters: AdapterStore | None,
    ) -> WorkerSettings:
        """Settings of rank 0; arguments as of :func:`~headrace.assembly.worker.factory.worker_factory`."""
        setup, config = self._setup, self._resolved.config
        watcher = None if self._experts is None else self._experts.balancer()
        return dataclasses.replace(
            self._of_rank(connector, leader=leader, watcher=watcher),
            kv_scales=setup.kv_scales,
            prompt_embeds=config.model.enable_prompt_embeds,
            profiler=config.profiler,
            kept_costs=kept_costs(self._resolved, self._ops, setup.threads, os.environ),
            sampling=SamplingSettings(
                logprobs_mode=config.model.logprobs_mode,
                seed=config.model.seed,
                grammars=grammars,
                make_processors=setup.make_processors,
            ),
            media=self._media(),
            drafts=self._drafts(),
            adapters=AdapterSettings(
                make_slots=None if adapters is None else self._make_slots, store=adapters
            ),
            weights=dataclasses.replace(self._changing_weights(), packed_ahead=self._packed_ahead),
        )

    def _of_rank(self, connector: KVConnector | None, **place: Any) -> WorkerSettings:
        """What every rank's worker is told.

        Args:
            place: further fields of its ``ranks``.
        """
        resolved, ranks = self._resolved, self._ranks
        config, info, device = resolved.config, resolved.info, resolved.platform.device
        return WorkerSettings(
            build_model=lambda slots=None: self._build(resolved, slots),
            ops=self._ops,
            device=device,
            dtype=info.dtype,
            limits=self._setup.limits,
            threads=self._setup.threads,
            capture=self._capture(),
            cache_ahead_bytes=config.cache.kv_cache_ahead_bytes,
            pooling=info.pooling,
            transfer=BlockTransferSettings(
                connector=connector, divide_blocks=block_divider(config, ranks.rank)
            ),
            ranks=RankSettings(
                rank=ranks.rank,
                memory_share=ranks.memory_share(device),
                leave_group=self._leave,
                report_group=ranks.report,
                shares_memory=ranks.size_here == ranks.world_size,
                experts=self._experts,
                **place,
            ),
        )

    def _capture(self) -> Capture | None:
        from headrace_engine.execution.capture import Capture

        config, ranks, ops = self._resolved.config, self._ranks, self._ops
        pools = self._resolved.info.pooling is not None
        if config.multimodal.only_encodes:
            return None
        divided = divided_pass(ranks, config.cache.block_size)
        return Capture(
            lambda: (
                undivided_graphs(ops.step_graph, divided, config.parallel)
                if ranks.can_record(pools=pools)
                else None
            ),
            self._setup.capture_sizes,
            enforce_eager=bool(config.graph.enforce_eager),
            recorders=ranks.recorders,
        )

    def _media(self) -> MediaSettings:
        config, kept = self._resolved.config, self._resolved.config.multimodal.encoder_cache_size
        return MediaSettings(
            largest=largest_media(self._resolved),
            max_vectors=kept if kept is not None else self._setup.limits.max_num_batched_tokens,
            make_transfer=transfer_maker(self._resolved),
            slices=self._slices,
            encoder_share=config.scheduler.encoder_share,
        )

    def _drafts(self) -> DraftSettings:
        config, draft, told = self._resolved.config, self._setup.draft, self._weights.draft_loaded

        def build(model: ResolvedConfig) -> CausalLM:
            return build_model(model, self._ops, self._setup.timeline, again=True, told=told)

        return DraftSettings(
            config=config.speculative,
            build_model=None if draft is None else lambda: build(draft),
            max_len=0 if draft is None else draft.info.max_model_len,
            build_head=head_builder(self._resolved, self._ops, told),
            head_within=is_within(config),
        )

    def _changing_weights(self) -> WeightSettings:
        from headrace_engine.execution.memory import of_one_rank

        return WeightSettings(
            rebuild_model=self._rebuild,
            build_beside=self._beside,
            beside_ended=self._beside.ended,
            max_bytes=of_one_rank(self._resolved.config).cache.max_memory_bytes,
            holder=self._weights,
            memory_pool=memory_pool(self._resolved),
        )

    def _packed_ahead(self) -> AheadBytes:
        """Wait for weights that are packed ahead. What the loader needs is imported meanwhile."""
        setup = self._setup
        if setup.ahead is None:
            return AheadBytes()
        with setup.timeline.phase("import models"):
            import headrace_models.loading.loader
            import headrace_models.loading.update  # noqa: F401 - timed here
        found = "map" if setup.ahead.expects_file else "wait for"
        with setup.timeline.phase(f"{found} packed weights"):
            return AheadBytes(setup.ahead.wait(), setup.ahead.reserved())

    def _build(
        self, model: ResolvedConfig, slots: AdapterSlots | None = None, *, again: bool = False
    ) -> CausalLM:
        return build_model(
            model, self._ops, self._setup.timeline, self._slices, slots, again=again,
            told=self._weights.loaded, ranks=self._ranks, experts=self._experts,
            ahead=None if again else self._setup.ahead,
        )  # fmt: skip

    def _rebuild(
        self, changes: Mapping[str, Any], slots: AdapterSlots | None = None, path: str | None = None
    ) -> CausalLM:
        config = self._resolved.config
        load = dataclasses.replace(config.load, **changes)
        changed = self._resolved._replace(config=dataclasses.replace(config, load=load))
        if path is not None:
            changed = resolved_beside(changed, path)
        return self._build(changed, slots, again=True)

    def _make_slots(self) -> AdapterSlots:
        return adapter_slots(self._resolved, self._ops)

    def _leave(self) -> None:
        if self._experts is not None:
            self._experts.close()
        self._ranks.leave()


def memory_pool(resolved: ResolvedConfig) -> MemoryPool | None:
    """Memory for weights and cache that can sleep below objects that stay; None on a CPU, where they are
    freed, and of an engine that does not sleep.

    Raises:
        MissingDependency, UnsupportedFeature, ConfigError: from the pool.
    """
    device = resolved.platform.device
    if device == "cpu" or not resolved.config.device.enable_sleep_mode:
        return None
    made: MemoryPool = plugins.load(MEMORY_POOLS, device)()
    return made


def processor_maker(
    resolved: ResolvedConfig, timeline: StartupTimeline
) -> Callable[[torch.device], Sequence[LogitsProcessor]] | None:
    """Makes the worker's logits processors, given its device: the users', then the model's own
    (:class:`headrace_core.model.GuidesSampling`). None: the model generates no text."""
    config, info = resolved.config, resolved.info
    if info.runner != "generate":
        return None
    users = logits_processors(config, timeline)

    def make(device: torch.device) -> Sequence[LogitsProcessor]:
        # The model is built by now, so its class is imported.
        own = getattr(model_class(info), "logits_processors", ())
        classes = tuple(dict.fromkeys([*users, *named_processors(own)]))
        if not classes:
            return ()
        from headrace_engine.sampling.processors import make_processors

        return make_processors(classes, config, device)

    return make


def encoder_slices(resolved: ResolvedConfig) -> EncoderSlices | None:
    """Where towers pause for steps; None: the model has none, or media are embedded whole."""
    config = resolved.config
    if not resolved.info.processor or not config.scheduler.encoder_share:
        return None
    if resolved.info.runner != "generate" or config.multimodal.only_encodes:
        return None
    from headrace_engine.encoder.slices import EncoderSlices

    return EncoderSlices()
