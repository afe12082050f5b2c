"""The native CPU kernels as a kernel provider."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headrace_core.graph import StepGraph
from headrace_core.ops import KernelNeed
from headrace_kernels.cpu import library

logger = logging.getLogger(__name__)


class CPUProvider:
    """Every op, natively, on the CPU, for float32, bfloat16 and float16."""

    name = "cpu"

    def refuse(self, need: KernelNeed) -> list[str]:
        """See :meth:`headrace_core.ops.KernelProvider.refuse`.

        Raises:
            ConfigError: ``HEADRACE_CPU_ISA`` names a level that is not there, though the CPU is asked for.
        """
        reasons = []
        if need.device != "cpu":
            reasons.append(f"device {need.device!r} is not 'cpu'")
        if need.dtype not in library.DTYPES:
            reasons.append(f"dtype {need.dtype!r} is not one of {list(library.DTYPES)}")
        absent = library.why_absent()
        if absent is not None:
            reasons.append(absent)
            if library.path() is not None:  # nobody expects the slow path of what was built
                logger.warning("%s", absent)
        elif not reasons:
            library.isa()
        return reasons

    def priority(self, need: KernelNeed) -> int:
        return 100

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        """All ops; sets the size of the process's kernel thread pool, and binds its threads."""
        import torch

        from headrace_kernels.cpu.ops import native_ops

        kernels = library.load(library.isa())
        threads = need.num_threads or min(torch.get_num_threads(), library.usable_cores())
        kernels.set_num_threads(threads)
        kernels.bind_threads(need.cores)
        bound = f" on cores {', '.join(map(str, need.cores))}" if need.cores else ""
        logger.info("native CPU kernels: %s, %d threads%s", kernels.isa, threads, bound)
        return native_ops(kernels)

    def step_graph(self, operations: Mapping[str, Any]) -> StepGraph:
        """See :meth:`headrace_core.ops.CapturesSteps.step_graph`."""
        from headrace_kernels.cpu.graph import NativeStepGraph
        from headrace_kernels.cpu.ops import NativeOps

        assert isinstance(operations, NativeOps), "operations are those of this provider"
        return NativeStepGraph(operations.library)

    def row_invariant(self, need: KernelNeed) -> bool:
        return True

    def vnni_packed(self, need: KernelNeed) -> bool:
        """See :meth:`headrace_core.ops.PacksVNNI.vnni_packed`."""
        return need.dtype == "bfloat16" and library.isa() in library.VNNI_ISAS


PROVIDER = CPUProvider()
