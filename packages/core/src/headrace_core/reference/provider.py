"""The kernel provider that is always there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core import reference
from headrace_core.ops import OP_NAMES, KernelNeed


class ReferenceProvider:
    """Every op, on every device and dtype, at the lowest priority."""

    name = "reference"

    def refuse(self, need: KernelNeed) -> list[str]:
        return []

    def priority(self, need: KernelNeed) -> int:
        return 0

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        return {op: getattr(reference, op) for op in OP_NAMES}

    def row_invariant(self, need: KernelNeed) -> bool:
        return False


PROVIDER = ReferenceProvider()
