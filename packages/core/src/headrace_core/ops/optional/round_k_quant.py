"""``round_k_quant``: a weight in the numbers of GGUF's k-quants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.ops.linear import QuantizedWeight


class RoundKQuantOp(Protocol):
    def __call__(self, weight: Tensor, bits: int) -> QuantizedWeight:
        """weight [N, K] of any floating dtype, K a multiple of 256, as Q4_K, Q5_K or Q6_K (``bits`` 4, 5, 6)
        hold it; bits are the definition's. Raises: WeightsError: infinities, NaN, scales beyond float16."""


ROUND_K_QUANT: OptionalOp[RoundKQuantOp] = OptionalOp("round_k_quant")
