"""``lse_correction``: attention to some keys, weighed for a sum with others (decode context parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class LSECorrectionOp(Protocol):
    def __call__(self, out: Tensor, lses: Tensor, rank: int) -> Tensor:
        """A rank's share of attention to all keys, ``out * exp(lses[rank]) / sum over n of exp(lses[n])`` in
        float32 (Milakov & Gimelshein 2018, arXiv:1805.02867), by rank whose heads they are; shares add up.

        Args:
            out: [T, H, D], this rank's attention to its own keys, N ranks' heads in order.
            lses: [N, T, H] float32, natural log-sum-exps of all ranks' scores. -inf, +inf and NaN: no keys.
            rank: this one's place in ``lses``.

        Returns:
            [N, T, H / N, D] float32; 0 for rows for which this rank has no keys, whatever ``out`` has there.
        """


LSE_CORRECTION: OptionalOp[LSECorrectionOp] = OptionalOp("lse_correction")
