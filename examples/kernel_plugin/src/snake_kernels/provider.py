"""The kernel provider ``snake``. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.ops import KernelNeed

DTYPES = ("float32", "bfloat16", "float16")


class SnakeProvider:
    """``xielu`` and ``snake``, on the CPU."""

    name = "snake"
    own_ops = ("snake",)
    """Operations that headrace does not know (:class:`headrace_core.ops.BringsOps`)."""

    def refuse(self, need: KernelNeed) -> list[str]:
        reasons = []
        if need.device != "cpu":
            reasons.append(f"device {need.device!r} is not served, only 'cpu'")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype!r} is not supported, only {list(DTYPES)}")
        return reasons

    def priority(self, need: KernelNeed) -> int:
        """Above the reference's 0, below the native kernels' 100: a user who wants this ``xielu`` says so."""
        return 10

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        from snake_kernels.snake import snake
        from snake_kernels.xielu import xielu

        return {"xielu": xielu, "snake": snake}

    def row_invariant(self, need: KernelNeed) -> bool:
        """Each value is computed by itself."""
        return True


PROVIDER = SnakeProvider()
