"""``wkv``: RWKV 4's weighted average over all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class WKVOp(Protocol):
    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        first: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
    ) -> Tensor:
        """RWKV 4's weighted average over all tokens, of each channel. Peng et al. 2023,
        arXiv:2305.13048.

        Numerator a and denominator b are kept as multiples of ``exp(m)``: ``y = (a e^m + e^(first + k) v) /
        (b e^m + e^(first + k))``, then ``a e^m <- e^decay a e^m + e^k v``, b alike with 1 for v, and m
        becomes ``max(decay + m, k)``. key, value [T, C] (rows may lie apart), decay (negative) and
        first [C] float32; state [*, 3, C] float32: a, b and m, of which a request that begins has 0, 0
        and -1e38. Returns [T, C] in value's dtype.
        """


WKV: OptionalOp[WKVOp] = OptionalOp("wkv")
