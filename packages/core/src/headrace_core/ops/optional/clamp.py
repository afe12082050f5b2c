"""``clamp``: values within two bounds (MPT, OLMo, DBRX)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class ClampOp(Protocol):
    def __call__(self, x: Tensor, low: float, high: float) -> Tensor:
        """``min(max(x, low), high)``, x [T, H]; NaN stays NaN."""


CLAMP: OptionalOp[ClampOp] = OptionalOp("clamp")
