"""Packed weights that a start leaves on the disk for the next one, if it is to (ADR 172)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.start_costs import cache_root

if TYPE_CHECKING:
    from headrace_core.model import ModelInfo
    from headrace_kernels.cpu.packed_file import PackedFile
    from headrace_kernels.cpu.packing_ahead import PackingAhead, PackJob
    from headrace_models.loading.ahead.plan import PackPlan

PACKED = "packed-weights"
"""Folder of packed weights below ``HEADRACE_CACHE_ROOT``."""


def pack_jobs(plan: PackPlan, info: ModelInfo) -> list[PackJob]:
    """What a plan says is to be packed, as the files are by now."""
    from headrace_kernels.cpu.packing_ahead import PackJob, Rows
    from headrace_models.loading.ahead.plan import planned_weights

    return [
        PackJob(
            planned.leaf,
            tuple(Rows(*piece) for piece in planned.parts),
            planned.in_features,
            planned.dtype,
        )
        for planned in planned_weights(plan, info.path)
        if planned.dtype == info.dtype
    ]


def keeps_packed(resolved: ResolvedConfig) -> bool:
    """True if packed weights are to be kept on the disk."""
    return resolved.config.device.packed_weights_cache_gb > 0


def kept_files(environ: Mapping[str, str]) -> list[Path]:
    """All files of packed weights that are kept."""
    root = cache_root(environ)
    return [] if root is None else sorted((root / PACKED).glob("*.weights"))


def packed_file(resolved: ResolvedConfig, plan: PackPlan, root: Path) -> PackedFile | None:
    """The file in which weights packed by a plan are kept; None: none are."""
    from headrace_kernels.cpu.packed_file import PackedFile

    if not keeps_packed(resolved):
        return None
    subject = {"files": plan.files, "weights": plan.weights, "dtype": resolved.info.dtype}
    most_bytes = int(resolved.config.device.packed_weights_cache_gb * (1 << 30))
    return PackedFile(root / PACKED, subject, most_bytes)


def keep_packed(
    resolved: ResolvedConfig, root: Path, ahead: PackingAhead | None, plan: PackPlan
) -> None:
    """Have packed weights written to the disk, in a thread, unless they are there.

    Args:
        ahead: this start's packing; None: it had none.
        plan: of what this start has loaded.
    """
    from headrace_kernels.cpu.packed_writer import PackedWriter

    file, info = packed_file(resolved, plan, root), resolved.info
    if file is not None:
        make_jobs = partial(pack_jobs, plan, info)
        PackedWriter(file, make_jobs, partial(plan.is_current, info.path), ahead).start()
