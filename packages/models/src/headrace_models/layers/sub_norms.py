"""Norms inside both halves of a block, before their last projections, as BitNet has them. Wang et al. 2023,
arXiv:2310.11453."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_models.layers.attention import Attention
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.heads_norm import WholeRMSNorm
from headrace_models.layers.mlp import GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class SubNormedAttention(Attention):
    """``out(norm(attention))``.

    Args:
        norm_eps: of the norm over all heads.
        arguments: of :class:`~headrace_models.layers.attention.Attention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        num_heads: int,
        head_dim: int,
        norm_eps: float,
        **arguments: Any,
    ) -> None:
        super().__init__(context, name, num_heads=num_heads, head_dim=head_dim, **arguments)
        self.sub_norm = WholeRMSNorm(
            context, f"{name}.attn_sub_norm", num_heads, head_dim, norm_eps
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        return self.out(in_rows(self.sub_norm(self.attend(*self.project(x), batch))))


class SubNormedMLP(GatedMLP):
    """``down(norm(act(gate(x)) * up(x)))``.

    Args:
        norm_eps: of the norm.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        norm_eps: float,
    ) -> None:
        super().__init__(context, name, hidden_size, intermediate_size, activation)
        self.sub_norm = WholeRMSNorm(
            context, f"{name}.ffn_sub_norm", intermediate_size, 1, norm_eps
        )

    def __call__(self, x: Tensor) -> Tensor:
        inner = by_heads(self.gate_up.gated(x, self.activation), 1)
        return self.down(in_rows(self.sub_norm(inner)))
