"""``rg_lru``: the real-gated linear recurrent unit (RecurrentGemma)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class RGLRUOp(Protocol):
    def __call__(
        self,
        x: Tensor,
        input_gate: Tensor,
        decay_gate: Tensor,
        decay: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        input_bias: Tensor,
        decay_bias: Tensor,
    ) -> Tensor:
        """The real-gated linear recurrent unit. De et al. 2024, arXiv:2402.19427.

        With ``i = sigmoid(input_gate + input_bias)`` and ``l = -8 softplus(decay) sigmoid(decay_gate +
        decay_bias)``: ``h <- exp(l) h + sqrt(1 - exp(2 l)) i x``, but ``h <- i x`` for the first token of
        a request that begins; y = h. x and both gates [T, C] (rows may lie apart), decay and biases [C]
        float32; state [*, C] float32. Returns [T, C] in x's dtype.
        """


RG_LRU: OptionalOp[RGLRUOp] = OptionalOp("rg_lru")
