"""``clamp``: values within two bounds (MPT, OLMo, DBRX)."""

from __future__ import annotations

from torch import Tensor

from headrace_reference.dtypes import unset_like


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """See :class:`headrace_core.ops.optional.clamp.ClampOp`."""
    return x.clamp(low, high)


def fake_clamp(x: Tensor, low: float, high: float) -> Tensor:
    return unset_like(x, *x.shape)
