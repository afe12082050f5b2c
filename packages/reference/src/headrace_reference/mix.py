"""``mix``: each token's own weighted sums of several vectors (Gemma 3n's AltUp, Llama 4)."""

from __future__ import annotations

from torch import Tensor

from headrace_reference.dtypes import unset_like, widened


def mix(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """See :class:`headrace_core.ops.optional.mix.MixOp`."""
    wide, by = widened(x), widened(weights)
    shape = (*weights.shape[:2], x.shape[2])
    total = wide.new_zeros(shape) if residual is None else widened(residual)
    for n in range(x.shape[1]):  # in order: addition does not commute in bits
        total = total + by[:, :, n, None] * wide[:, None, n]
    return total.to(x.dtype)


def fake_mix(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    return unset_like(x, *weights.shape[:2], x.shape[2])
