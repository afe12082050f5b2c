"""The worker: a model with its ops, threads, quantization and attention.

The only part of the assembly that imports torch, and it does so when a worker is made.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from headrace.assembly.drafts.head import has_head, head_builder, is_within
from headrace.assembly.drafts.model import draft_model
from headrace.assembly.hosts.nodes import node_plan
from headrace.assembly.logits_processors import named_processors
from headrace.assembly.media import largest_media
from headrace.assembly.memory_check import check_room
from headrace.assembly.named import kv_scale_constants
from headrace.assembly.parallel.communicators import communicator_name
from headrace.assembly.parallel.context_parallel import key_sharing, share_blocks
from headrace.assembly.parallel.eager_passes import undivided_graphs
from headrace.assembly.parallel.experts import divided_experts
from headrace.assembly.parallel.prefill_context import (
    check_tokens_only,
    divide_passes,
    divided_pass,
    dividing,
)
from headrace.assembly.parallel.ranks import (
    FOLLOWER_FACTORY,
    Ranks,
    group_names,
    open_rendezvous,
)
from headrace.assembly.plugged import logits_processors
from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.speech.transcription import model_class
from headrace.assembly.start_costs import kept_costs
from headrace.assembly.transfer.encoder import transfer_maker
from headrace.assembly.transfer.kv import block_divider
from headrace_attention.selection import BackendChooser, choose_backend
from headrace_core import plugins
from headrace_core.attention import (
    AttentionBackend,
    AttentionNeed,
    BackendFacts,
    EncoderBackend,
)
from headrace_core.errors import ConfigError, PluginError
from headrace_core.model import BuildContext, CausalLM
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_core.platform import BringsWorker
from headrace_engine.config import capture_sizes
from headrace_engine.cores import CpuThreads, format_cores, plan_threads

if TYPE_CHECKING:
    import torch

    from headrace.assembly.parallel.experts import DividedMixtures
    from headrace_core.executor import Worker, WorkerFactory
    from headrace_core.kv import KVConnector
    from headrace_core.lora import AdapterSlots
    from headrace_core.sampling.logits_processor import LogitsProcessor
    from headrace_engine.encoder.slices import EncoderSlices
    from headrace_engine.execution.worker import LeadsPasses, ServingWorker
    from headrace_engine.lockstep.peers import PeerEngines
    from headrace_engine.lora.store import AdapterStore
    from headrace_engine.multiproc.nodes.plan import NodePlan
    from headrace_engine.multiproc.places import RankPlace
    from headrace_engine.sleep.memory_pool import MemoryPool
    from headrace_engine.startup import StartupTimeline
    from headrace_engine.structured.store import GrammarStore
    from headrace_engine.weights.update_set import LoadedModel

logger = logging.getLogger(__name__)

MEMORY_POOLS = "headrace.memory_pools"


def platforms_worker(resolved: ResolvedConfig) -> WorkerFactory:
    """Makes the worker of a platform that brings its own."""
    platform = resolved.platform
    assert isinstance(platform, BringsWorker)
    return lambda: platform.make_worker(resolved.config, resolved.info)


def worker_factory(
    resolved: ResolvedConfig,
    timeline: StartupTimeline,
    grammars: GrammarStore | None = None,
    adapters: AdapterStore | None = None,
    place: RankPlace | None = None,
    leader: LeadsPasses | None = None,
    connector: KVConnector | None = None,
    peers: PeerEngines | None = None,
) -> Callable[[], ServingWorker]:
    """Makes the worker of the resolved model, which loads it when asked to.

    Args:
        adapters: of requests; None: they have none.
        place: its rank; None: there is one.
        leader: makes the model's passes run on the other ranks; None: there are none, or this one follows.
        connector: of blocks outside the cache; None: there are none.
        peers: engines with which this one shares experts; None: there are none, or the rank is not 0.
    """
    from headrace_engine.execution.capture import Capture
    from headrace_engine.multiproc.following import FollowingWorker
    from headrace_engine.weights.extension import extended, load_extension
    from headrace_engine.weights.holder import WeightHolder
    from headrace_engine.weights.worker import ModelWorker

    config, info, platform, _ = resolved
    tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    assert tokens is not None
    assert seqs is not None
    sizes = capture_sizes(
        config.graph.cudagraph_capture_sizes,
        config.graph.max_cudagraph_capture_size,
        max_num_batched_tokens=tokens,
    )
    ranks = Ranks(place, config.parallel.decode_context_parallel_size)
    threads = ranks.threads(cpu_threads(resolved))
    kv_scales = kv_scale_constants(config.cache, os.environ)
    make_processors = processor_maker(resolved, timeline)
    draft = draft_model(resolved)
    worker_class = extended(ModelWorker, load_extension(config.parallel.worker_extension_cls))

    def make_worker() -> ServingWorker:
        from headrace.assembly.beside import beside_builder, resolved_beside

        ranks.use_device(platform.device)
        ops = choose_ops(resolved, timeline, threads)
        slices = None if ranks.are_several else encoder_slices(resolved)
        divided = divided_pass(ranks, config.cache.block_size)
        experts = divided_experts(config.parallel, ranks, tokens)
        if experts is not None and peers is not None:
            experts.waves = peers.waves

        def leave() -> None:
            if experts is not None:
                experts.close()
            ranks.leave()

        def build(
            model: ResolvedConfig, slots: AdapterSlots | None = None, *, again: bool = False
        ) -> CausalLM:
            return build_model(
                model, ops, timeline, slices, slots, again=again, told=weights.loaded, ranks=ranks,
                experts=experts,
            )  # fmt: skip

        weights = WeightHolder(
            lambda slots=None: without_weights(resolved, ops, slices, slots),
            within=is_within(config),
        )

        def rebuild(
            changes: Mapping[str, Any], slots: AdapterSlots | None = None, path: str | None = None
        ) -> CausalLM:
            load = dataclasses.replace(config.load, **changes)
            changed = dataclasses.replace(config, load=load)
            changed_model = resolved._replace(config=changed)
            if path is not None:
                changed_model = resolved_beside(changed_model, path)
            return build(changed_model, slots, again=True)

        of_rank: dict[str, Any] = {
            "ops": ops,
            "device": platform.device,
            "dtype": info.dtype,
            "vocab_size": info.vocab_size,
            "max_model_len": info.max_model_len,
            "max_num_batched_tokens": tokens,
            "max_num_seqs": seqs,
            "num_threads": threads.num_threads,
            "cores": threads.cores,
            "cache_ahead_bytes": config.cache.kv_cache_ahead_bytes,
            "experts": experts,
            "pooling": info.pooling,
            "rank": ranks.rank,
            "memory_share": ranks.memory_share(platform.device),
            "leave_group": leave,
            "report_group": ranks.report,
            "capture": None
            if config.multimodal.only_encodes
            else Capture(
                lambda: (
                    undivided_graphs(ops.step_graph, divided, config.parallel)
                    if ranks.can_record()
                    else None
                ),
                sizes,
                enforce_eager=bool(config.graph.enforce_eager),
                recorders=ranks.recorders,
            ),
        }
        if ranks.rank:
            return FollowingWorker(
                lambda slots=None: build(resolved, slots),
                **of_rank,
                has_inputs=ranks.stage == 0,
                reads_states=has_head(config, info),
                make_adapters=(lambda: adapter_slots(resolved, ops))
                if config.lora.enable_lora
                else None,
                connector=connector,
                divide_blocks=block_divider(config, ranks.rank),
            )
        return worker_class(
            lambda slots=None: build(resolved, slots),
            **of_rank,
            leader=leader,
            watcher=None if experts is None else experts.balancer(),
            logprobs_mode=config.model.logprobs_mode,
            seed=config.model.seed,
            kv_scales=kv_scales,
            grammars=grammars,
            make_processors=make_processors,
            prompt_embeds=config.model.enable_prompt_embeds,
            profiler=config.profiler,
            largest_media=largest_media(resolved),
            max_media_vectors=kept
            if (kept := config.multimodal.encoder_cache_size) is not None
            else tokens,
            rebuild_model=rebuild,
            make_transfer=transfer_maker(resolved),
            connector=connector,
            divide_blocks=block_divider(config, ranks.rank),
            slices=slices,
            encoder_share=config.scheduler.encoder_share,
            speculative=config.speculative,
            build_draft=None
            if draft is None
            else lambda: build_model(draft, ops, timeline, again=True, told=weights.draft_loaded),
            build_head=head_builder(resolved, ops, weights.draft_loaded),
            head_within=is_within(config),
            draft_max_len=0 if draft is None else draft.info.max_model_len,
            make_adapters=None if adapters is None else lambda: adapter_slots(resolved, ops),
            adapter_store=adapters,
            memory_pool=memory_pool(resolved),
            build_beside=beside_builder(resolved, ops, slices),
            max_bytes=config.cache.max_memory_bytes,
            weights=weights,
            kept_costs=kept_costs(resolved, ops, threads, os.environ),
        )

    return make_worker


def ranked_workers(
    resolved: ResolvedConfig,
    timeline: StartupTimeline,
    grammars: GrammarStore | None = None,
    adapters: AdapterStore | None = None,
    connector: KVConnector | None = None,
    nodes: NodePlan | None = None,
    peers: PeerEngines | None = None,
) -> WorkerFactory:
    """Makes the workers of all ranks of the resolved model; arguments as :func:`worker_factory`'s.

    Args:
        nodes: processes that have the other ranks, if somebody else starts them.
        peers: engines with which this one shares experts; None: there are none.
    """
    from headrace_engine.multiproc.places import RankedWorkers
    from headrace_engine.step_timer import timed_workers

    config = resolved.config
    parallel = config.parallel

    def make(place: RankPlace, leader: LeadsPasses | None) -> Worker:
        made = worker_factory(
            resolved, timeline, grammars, adapters, place, leader, connector, peers
        )
        # Rank 0's is a ModelWorker.
        return timed_workers(cast("WorkerFactory", made), config.observability)()

    if parallel.num_ranks == 1 and peers is None:
        return RankedWorkers(make, FOLLOWER_FACTORY, config)
    plan = nodes or node_plan(resolved)
    meet = open_rendezvous if plan is None else partial(open_rendezvous, plan.host)
    return RankedWorkers(
        make,
        FOLLOWER_FACTORY,
        config,
        parallel.num_ranks,
        communicator_name(config, resolved.platform.device),
        meet,
        group_names(parallel),
        parallel.pipeline_parallel_size,
        plan,
        peers,
        parallel.prefill_context_parallel_size,
    )


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


def cpu_threads(resolved: ResolvedConfig) -> CpuThreads:
    """Number of CPU threads, and their cores.

    Raises:
        ConfigError: more threads, or other cores, than this process may use.
    """
    import torch

    device = resolved.config.device
    threads = plan_threads(device.num_threads, device.cpu_bind, default=torch.get_num_threads())
    if threads.cores:
        logger.info("cpu_bind: CPU threads on cores %s", format_cores(threads.cores))
    return threads


def choose_ops(resolved: ResolvedConfig, timeline: StartupTimeline, threads: CpuThreads) -> OpTable:
    """The best installed implementation of every op, for this device and dtype."""
    config, info, platform, _ = resolved
    need = KernelNeed(platform.device, info.dtype, threads.num_threads, threads.cores)
    with timeline.phase("bind kernels"):
        ops = bind_ops(need, choose=config.device.kernels)
    if threads.cores and "cpu" not in ops.providers.values():
        raise ConfigError(
            f"device.cpu_bind = {config.device.cpu_bind!r}: must be 'none' without the native CPU "
            "kernels: torch's threads cannot be bound to single cores (`headrace collect-env` shows why "
            "the native kernels are not used)",
            field="device.cpu_bind",
        )
    check_batch_invariant(platform.device, ops, os.environ)
    if platform.device == "cpu" and not ops.row_invariant:
        logger.warning(
            "with these kernels, outputs may depend on batching; `headrace collect-env` shows why the "
            "native kernels are not used"
        )
    return ops


def check_batch_invariant(device: str, ops: OpTable, environ: Mapping[str, str]) -> None:
    """Hold the kernels to ``HEADRACE_BATCH_INVARIANT=1``.

    Raises:
        ConfigError: on a CPU, kernels are used whose results depend on the batch.
    """
    if environ.get("HEADRACE_BATCH_INVARIANT") != "1" or ops.row_invariant:
        return
    used = ", ".join(sorted(set(ops.providers.values())))
    told = f"HEADRACE_BATCH_INVARIANT = '1': the kernels in use ({used})"
    if device == "cpu":
        raise ConfigError(
            f"{told} do not keep to it: must be unset, or headrace's native CPU kernels must serve every op "
            "(`headrace collect-env` shows why they do not)",
            field="HEADRACE_BATCH_INVARIANT",
        )
    logger.warning(
        "%s do not promise it for every op: what comes from the reference is torch's", told
    )


def encoder_slices(resolved: ResolvedConfig) -> EncoderSlices | None:
    """Where towers pause for steps; None: the model has none, or media are embedded whole."""
    config = resolved.config
    if not resolved.info.processor or not config.scheduler.encoder_share:
        return None
    if resolved.info.runner != "generate" or config.multimodal.only_encodes:
        return None
    from headrace_engine.encoder.slices import EncoderSlices

    return EncoderSlices()


def cut_files_raise() -> AbstractContextManager[None]:
    """See :func:`headrace_kernels.mapped.cut_files.cut_files_raise`; without that package, which is an extra,
    a file that is cut may end the process (SIGBUS)."""
    try:
        from headrace_kernels.mapped.cut_files import cut_files_raise as watched
    except ModuleNotFoundError:
        return nullcontext()
    return watched()


def build_model(
    resolved: ResolvedConfig,
    ops: OpTable,
    timeline: StartupTimeline,
    slices: EncoderSlices | None = None,
    adapters: AdapterSlots | None = None,
    *,
    again: bool = False,
    told: Callable[[LoadedModel], None] | None = None,
    ranks: Ranks | None = None,
    experts: DividedMixtures | None = None,
) -> CausalLM:
    """Choose quantization and attention, build the model and read its weights.

    Args:
        slices: where towers pause; None: they never do.
        adapters: the slots of :func:`adapter_slots`; None: requests have no adapters.
        again: the model takes the place of one that is still held, so that free memory says nothing.
        told: is told how the model was loaded, so that its weights can be replaced.
        ranks: over which its layers are divided; None: it is whole.
        experts: that ranks have whole; None: they are divided as all else is.
    """
    with timeline.phase("import models"):
        from headrace.progress import progress_bars
        from headrace_models.loading.loader import load_model
        from headrace_models.loading.update import LoadRecord
        from headrace_models.sequence_parallel import check_shareable, share_tokens

        config, info = resolved.config, resolved.info
        choose = backend_chooser(resolved, ops)
        context = build_context(resolved, ops, choose, slices, adapters, ranks, experts)
        record = None if told is None else LoadRecord()
        share = 1 if ranks is None else ranks.memory_share(resolved.platform.device)
        shares_tokens = ranks is not None and config.parallel.enable_sp

    def admit(model: CausalLM) -> None:
        if ranks is not None and ranks.share_keys:
            share_blocks(model, config.parallel.decode_context_parallel_size)
        if ranks is not None and ranks.divide_prompts:
            check_tokens_only(model)
        if shares_tokens:
            check_shareable(model)
        if again:
            return
        if experts is not None:
            experts.check_found(info.architecture)
        check_room(resolved, model, share)

    with (
        progress_bars(config.load.use_tqdm_on_load) as progress,
        timeline.phase("read and pack weights"),
        cut_files_raise(),
    ):
        model = load_model(
            info,
            context,
            load=config.load,
            seed=config.model.seed,
            progress=progress,
            admit=admit,
            only_towers=config.multimodal.only_encodes and info.source == "native",
            record=record,
        )
    choose.check_used()
    if experts is not None:
        experts.settle()
        experts.meet_engines(model)
    if told is not None and record is not None:
        told(record)
    if ranks is not None and shares_tokens:
        ranks.shares = share_tokens(model, context.communicator)
    divided = None if ranks is None else divided_pass(ranks, config.cache.block_size)
    if divided is not None:
        divide_passes(model, divided)
    return model


def without_weights(
    resolved: ResolvedConfig,
    ops: OpTable,
    slices: EncoderSlices | None = None,
    adapters: AdapterSlots | None = None,
) -> LoadedModel:
    """Build the model, whose weights are to come by an update. Arguments as :func:`build_model`'s."""
    from headrace_models.loading.update import blank_model

    choose = backend_chooser(resolved, ops)
    return blank_model(resolved.info, build_context(resolved, ops, choose, slices, adapters))


def adapter_slots(resolved: ResolvedConfig, ops: OpTable) -> AdapterSlots:
    """Slots for low-rank adapters of the model that is built next.

    Raises:
        ConfigError: no kernel provider computes adapters here.
    """
    from headrace_models.lora.adapters import Adapters

    config, info, platform, _ = resolved
    tokens = config.scheduler.max_num_batched_tokens
    assert tokens is not None
    dtype = info.dtype if config.lora.lora_dtype == "auto" else config.lora.lora_dtype
    return Adapters(
        ops,
        max_loras=config.lora.max_loras,
        max_lora_rank=config.lora.max_lora_rank,
        dtype=dtype,
        device=platform.device,
        max_tokens=tokens,
        max_logits_rows=tokens,
        towers=config.lora.enable_tower_connector_lora,
        fully_sharded=config.lora.fully_sharded_loras,
    )


def backend_chooser(resolved: ResolvedConfig, ops: OpTable) -> BackendChooser:
    """Chooses the backends of one model's layers."""
    config, _, platform, _ = resolved
    return BackendChooser(ops, wanted=config.attention.backend, preferred=platform.attention_order)


def tower_chooser(
    resolved: ResolvedConfig, ops: OpTable, choose: Callable[[AttentionNeed], BackendFacts]
) -> Callable[[AttentionNeed], BackendFacts]:
    """Chooses the backends of layers without a cache: of towers, the one that the operator names for them.

    Args:
        choose: what chooses otherwise.

    Raises:
        ConfigError: the model has no towers.
    """
    wanted, field = (
        resolved.config.multimodal.mm_encoder_attn_backend, "multimodal.mm_encoder_attn_backend"
    )  # fmt: skip
    if wanted is None:
        return choose
    if not resolved.info.processor:
        raise ConfigError(
            f"{field} = {wanted!r}: must be left out: the model has no towers for media",
            field=field,
        )
    made: dict[AttentionNeed, BackendFacts] = {}

    def of_tower(need: AttentionNeed) -> BackendFacts:
        if need.attention_type != "encoder":
            return choose(need)
        if need not in made:
            try:
                made[need] = choose_backend(need, wanted=wanted)(ops)
            except ConfigError as error:
                raise ConfigError(f"{field}: {error}", field=field) from error
        return made[need]

    return of_tower


def build_context(
    resolved: ResolvedConfig,
    ops: OpTable,
    choose: Callable[[AttentionNeed], BackendFacts],
    slices: EncoderSlices | None = None,
    adapters: AdapterSlots | None = None,
    ranks: Ranks | None = None,
    experts: DividedMixtures | None = None,
) -> BuildContext:
    """Build context of a model on one rank.

    Args:
        choose: the backend of each layer.
        slices: where towers pause; None: they never do.
        adapters: see :func:`build_model`.
        ranks: likewise.
        experts: likewise.
    """
    from headrace_core.parallel import SingleProcess
    from headrace_models.quantization import quant_method
    from headrace_models.stages.division import PARTITION

    config, info, platform, _ = resolved
    assert config.cache.block_size is not None
    uncached = tower_chooser(resolved, ops, choose)
    sharing, cut = key_sharing(config, ops, ranks), dividing(ops, ranks)
    return BuildContext(
        config=info.config,
        dtype=info.dtype,
        device=platform.device,
        ops=ops,
        quant=quant_method(
            info,
            config.model.quantization,
            ops,
            device=platform.device,
            device_capability=_capability(platform.device),
            overrides=config.model.quantization_overrides,
            activations=config.model.quantization_activations,
        ),
        communicator=SingleProcess() if ranks is None else ranks.communicator(),
        attention=lambda need: cut(need, sharing(need, _paged(choose(need)))),
        encoder_attention=lambda need: _pausing(_without_cache(uncached(need)), need, slices),
        block_size=config.cache.block_size,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        max_model_len=info.max_model_len,
        pooling=info.pooling,
        path=info.path,
        whole_config=info.whole_config,
        generation_config=info.generation_config,
        trust_remote_code=info.trust_remote_code,
        adapters=adapters,
        experts=None if experts is None else experts.division,
        stage=None if ranks is None else ranks.stages(os.environ.get(PARTITION)),
    )


def _capability(device: str) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU; None: another device."""
    import torch

    if device != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability()


def _paged(backend: BackendFacts) -> AttentionBackend:
    if not isinstance(backend, AttentionBackend):
        raise PluginError(f"attention backend {backend.name!r} is not an AttentionBackend")
    return backend


def _without_cache(backend: BackendFacts) -> EncoderBackend:
    if not isinstance(backend, EncoderBackend):
        raise PluginError(f"attention backend {backend.name!r} is not an EncoderBackend")
    return backend


def _pausing(
    backend: EncoderBackend, need: AttentionNeed, slices: EncoderSlices | None
) -> EncoderBackend:
    """A tower's backend, with pauses."""
    if slices is None or need.attention_type != "encoder":
        return backend
    from headrace_engine.encoder.slices import PausingBackend

    return PausingBackend(backend, slices.pause)
