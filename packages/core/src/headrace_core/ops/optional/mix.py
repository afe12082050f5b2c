"""``mix``: each token's own weighted sums of several vectors (Gemma 3n's AltUp, Llama 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class MixOp(Protocol):
    def __call__(self, x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
        """Each token's own sums of its vectors: ``residual[t, m] + sum over n of weights[t, m, n]
        x[t, n]``.

        x [T, N, H] and residual [T, M, H] of one dtype, weights [T, M, N] float32, all with rows that may
        lie apart (the weights' even at one place) -> [T, M, H]. In float32, in the order of n, rounded
        once. Source: Baykal et al. 2023, arXiv:2301.13310.
        """


MIX: OptionalOp[MixOp] = OptionalOp("mix")
