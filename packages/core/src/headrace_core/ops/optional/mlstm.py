"""``mlstm``: the matrix memory of xLSTM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class MLSTMOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        input_gate: Tensor,
        forget_gate: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        scale: float,
        eps: float,
    ) -> Tensor:
        """The matrix memory of xLSTM. Beck et al. 2024, arXiv:2405.04517.

        Memory C and normaliser n are kept as multiples of ``exp(m)``. With ``f = logsigmoid(forget_gate)``
        and ``m' = max(f + m, input_gate)``: ``C <- exp(f + m - m') C + exp(input_gate - m') k (x) v``, n
        alike with 1 for v, then ``o = scale C^T q / (max(|scale n . q|, exp(-m')) + eps)``. query, key
        [T, H, N], value [T, H, P], gates [T, H] float32; state [*, H, N P + N + 1] float32: C [N, P], n and
        m of each head. Rows may lie apart. Returns [T, H, P] in value's dtype.
        """


MLSTM: OptionalOp[MLSTMOp] = OptionalOp("mlstm")
