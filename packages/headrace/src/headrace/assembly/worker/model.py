"""The model: built, and its weights read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from headrace.assembly.memory_check import check_room
from headrace.assembly.parallel.context_parallel import share_blocks
from headrace.assembly.parallel.prefill_context import (
    check_tokens_only,
    divide_passes,
    divided_pass,
)
from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.worker.context import backend_chooser, build_context
from headrace_core.model import CausalLM, ProgressCallback
from headrace_core.ops import OpTable

if TYPE_CHECKING:
    from headrace.assembly.parallel.experts import DividedMixtures
    from headrace.assembly.parallel.ranks import Ranks
    from headrace_core.lora import AdapterSlots
    from headrace_engine.encoder.slices import EncoderSlices
    from headrace_engine.startup import StartupTimeline
    from headrace_engine.weights.update_set import LoadedModel
    from headrace_models.loading.ahead.weights import WeightsAhead


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
    ahead: WeightsAhead | None = None,
    check: Callable[[CausalLM], None] = lambda model: None,
    progress: ProgressCallback | None = None,
) -> CausalLM:
    """Choose quantization and attention, build the model and read its weights.

    Args:
        slices: where towers pause; None: they never do.
        adapters: the slots of :func:`adapter_slots`; None: requests have no adapters.
        again: the model takes the place of one that is still held, so that free memory says nothing.
        told: is told how the model was loaded, so that its weights can be replaced.
        ranks: over which its layers are divided; None: it is whole.
        experts: that ranks have whole; None: they are divided as all else is.
        ahead: weights that are packed already; None: the loader packs all.
        check: called with the model before a weight is read; what it raises ends the reading.
        progress: told the bytes that are done; None: bars show them.
    """
    with timeline.phase("import models"):
        import headrace_models.sequence_parallel  # noqa: F401 - timed here
        from headrace.progress import progress_bars
        from headrace_models.loading.loader import load_model
        from headrace_models.loading.update import LoadRecord

        config, info = resolved.config, resolved.info
        choose = backend_chooser(resolved, ops)
        context = build_context(resolved, ops, choose, slices, adapters, ranks, experts)
        record = None if told is None else LoadRecord()
        share = 1 if ranks is None else ranks.memory_share(resolved.platform.device)

    def admit(model: CausalLM) -> None:
        _begin_division(resolved, model, ranks)
        check(model)
        if again:
            return
        if experts is not None:
            experts.check_found(info.architecture)
        check_room(resolved, model, share, 0 if ahead is None else ahead.reserved())

    with (
        progress_bars(config.load.use_tqdm_on_load and progress is None) as bars,
        timeline.phase("read and pack weights"),
        cut_files_raise(),
    ):
        model = load_model(
            info,
            context,
            load=config.load,
            seed=config.model.seed,
            progress=progress or bars,
            admit=admit,
            only_towers=config.multimodal.only_encodes and info.source == "native",
            record=record,
            ahead=ahead,
        )
    choose.check_used()
    if experts is not None:
        experts.meet_engines(model)
        experts.settle(model)
    if told is not None and record is not None:
        told(record)
    _end_division(resolved, model, ranks)
    return model


def _begin_division(resolved: ResolvedConfig, model: CausalLM, ranks: Ranks | None) -> None:
    """Set a model up that is divided over ranks, and has no weights yet.

    Raises:
        ConfigError: it cannot be divided so.
    """
    from headrace_models.sequence_parallel import check_shareable

    if ranks is None:
        return
    parallel = resolved.config.parallel
    if ranks.share_keys:
        share_blocks(model, parallel.decode_context_parallel_size)
    if ranks.divide_prompts:
        check_tokens_only(model)
    if parallel.enable_sp:
        check_shareable(model)


def _end_division(resolved: ResolvedConfig, model: CausalLM, ranks: Ranks | None) -> None:
    """Have the passes of such a model be divided, whose layers will not change any more."""
    from headrace_models.sequence_parallel import share_tokens

    if ranks is None:
        return
    config = resolved.config
    if config.parallel.enable_sp:
        ranks.shares = share_tokens(model, ranks.communicator())
    divided = divided_pass(ranks, config.cache.block_size)
    if divided is not None:
        divide_passes(model, divided)


def without_weights(
    resolved: ResolvedConfig,
    ops: OpTable,
    slices: EncoderSlices | None = None,
    adapters: AdapterSlots | None = None,
    ranks: Ranks | None = None,
    experts: DividedMixtures | None = None,
) -> LoadedModel:
    """Build the model, whose weights are to come by an update. Arguments as :func:`build_model`'s."""
    from headrace_models.loading.update import blank_model

    choose = backend_chooser(resolved, ops)
    context = build_context(resolved, ops, choose, slices, adapters, ranks, experts)
    record = blank_model(resolved.info, context)
    _begin_division(resolved, record.model, ranks)
    _end_division(resolved, record.model, ranks)
    return record


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
