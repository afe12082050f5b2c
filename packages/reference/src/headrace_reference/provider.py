"""The kernel provider that is always there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.ops import KernelNeed
from headrace_reference.definitions import definitions


class ReferenceProvider:
    """Every op, on every device and dtype, at the lowest priority."""

    name = "reference"

    def refuse(self, need: KernelNeed) -> list[str]:
        return []

    def priority(self, need: KernelNeed) -> int:
        return 0

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        return {name: definition.op for name, definition in definitions().items()}

    def row_invariant(self, need: KernelNeed) -> bool:
        return False


PROVIDER = ReferenceProvider()
