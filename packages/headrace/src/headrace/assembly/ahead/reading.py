"""Weights that are read from disk, and packed, while torch is imported."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from headrace.assembly.ahead.packed import keep_packed, keeps_packed, pack_jobs, packed_file
from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.start_costs import cache_root
from headrace_core.platform import BringsWorker

if TYPE_CHECKING:
    from headrace_models.loading.ahead.weights import WeightsAhead

logger = logging.getLogger(__name__)

PLANS = "pack-plans"
"""Folder of plans below ``HEADRACE_CACHE_ROOT``."""


def start_reading(
    resolved: ResolvedConfig, environ: Mapping[str, str] = os.environ
) -> WeightsAhead | None:
    """Have the weights read from disk while torch is imported, and packed if an earlier start has left a
    plan. Returns what the loader is to be told of; None: nothing."""
    ahead = _begun(resolved, environ)
    if ahead is None and keeps_packed(resolved):
        logger.warning(
            "packed_weights_cache_gb = %g: no packed weights are kept: that takes one rank on a CPU, "
            "safetensors files of at most half of the free memory, --safetensors-load-strategy lazy, "
            "headrace's own kernels, --cpu-bind none, --keep-start-costs and a HEADRACE_CACHE_ROOT",
            resolved.config.device.packed_weights_cache_gb,
        )
    return ahead


def _begun(resolved: ResolvedConfig, environ: Mapping[str, str]) -> WeightsAhead | None:
    from headrace_models.checkpoint.read_ahead import read_ahead

    config, info = resolved.config, resolved.info
    if isinstance(resolved.platform, BringsWorker) or config.multimodal.only_encodes:
        return None  # nothing is read, or a part
    if config.load.load_format == "dummy" or resolved.platform.device != "cpu":
        return None
    available = resolved.platform.available_memory()
    ahead = weights_ahead(resolved, available, environ)
    if ahead is None or not ahead.expects_file:
        read_ahead(info.path, weight_bytes=info.weight_bytes, available=available, load=config.load)
    return ahead


def weights_ahead(
    resolved: ResolvedConfig, available: int, environ: Mapping[str, str]
) -> WeightsAhead | None:
    """Weights that are packed from now on, by the plan of an earlier start of the same; None: this start
    has no use for a plan, and leaves none.

    One rank that nobody shares the machine's memory with, on a CPU, with native kernels whose threads are
    not bound: they would write weights into the memory of any core. A model that takes more than half of the
    memory that is free is packed when its size has been checked.

    Args:
        available: bytes of memory that are free.
    """
    config, info = resolved.config, resolved.info
    root = cache_root(environ)
    alone = config.parallel.num_ranks == 1 and not config.parallel.is_replicated
    usual = config.device.cpu_bind == "none" and not config.device.kernels
    mapped = config.load.safetensors_load_strategy != "eager"
    if root is None or not (config.device.keep_start_costs and alone and usual and mapped):
        return None
    if not info.path.is_dir() or not 0 < info.weight_bytes <= available // 2:
        return None
    try:
        from headrace_kernels.cpu.packing_ahead import SMALLEST, open_packing
    except ModuleNotFoundError:  # an extra
        return None
    from headrace_models.loading.ahead.plan import KeptPlan
    from headrace_models.loading.ahead.weights import WeightsAhead

    kept = KeptPlan(root / PLANS, _subject(resolved, environ))
    plan, packer = kept.find(), None
    if plan is not None:
        packer = open_packing(pack_jobs(plan, info), packed_file(resolved, plan, root))
    if packer is not None:
        packer.start(config.device.num_threads)
    keep = partial(keep_packed, resolved, root, packer) if keeps_packed(resolved) else None
    return WeightsAhead(info.path, kept, plan, packer, smallest=SMALLEST, keep=keep)


def _subject(resolved: ResolvedConfig, environ: Mapping[str, str]) -> dict[str, object]:
    """What decides on which tensors become one weight: a plan that is of something else is of no use, though
    it does no harm."""
    return {
        "config": dataclasses.asdict(resolved.config),
        "model": dataclasses.asdict(resolved.info),
        "isa": environ.get("HEADRACE_CPU_ISA"),
    }
