"""CPU threads, and the best installed kernel of every op."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.assembly.resolved import ResolvedConfig
from headrace_core.errors import ConfigError
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_engine.cores import CpuThreads, format_cores, plan_threads

if TYPE_CHECKING:
    from headrace_engine.startup import StartupTimeline

logger = logging.getLogger(__name__)


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
        ConfigError: on a CPU, kernels are used whose results depend on the batch; or the variable is neither
            0 nor 1: ``true`` must not look like the promise.
    """
    value = environ.get("HEADRACE_BATCH_INVARIANT", "")
    if value not in ("", "0", "1"):
        raise ConfigError(
            f"HEADRACE_BATCH_INVARIANT = {value!r}: must be 1, or 0 or unset",
            field="HEADRACE_BATCH_INVARIANT",
        )
    if value != "1" or ops.row_invariant:
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
