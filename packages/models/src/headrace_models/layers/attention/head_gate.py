"""A gate for each head of attention, which each token opens: Qiu et al. 2025, arXiv:2505.06708, as LFM3 and
Ling 3 have it.

Letters: T tokens, H heads of this rank, V size of a head's value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import MAX_HEADS
from headrace_models.layers.attention.mla import MLAAttention, MLASizes
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import Layer
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.linear import column_parallel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class HeadGate(Layer):
    """``out * sigmoid(projection(x))``, one number for each head.

    Args:
        name: of the projection, as the checkpoint spells it.

    Raises:
        UnsupportedModel: more than :data:`~headrace_models.config.settings.MAX_HEADS`.
    """

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, num_heads: int, size: int
    ) -> None:
        if num_heads > MAX_HEADS:
            raise UnsupportedModel(f"{name}: {num_heads} heads: must be at most {MAX_HEADS}")
        self.ops = context.ops
        self.projection = column_parallel(
            context, name, hidden_size, (num_heads,), units=(num_heads,)
        )
        # Each head's number once for each of its channels: a product with ones, as a step is captured
        # from ops only.
        own = sum(self.projection.spec.out_parts)
        ones = torch.ones((own, size, 1), dtype=getattr(torch, context.dtype))
        self.ones = context.ops.head_linear.pack(ones.to(context.device))

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """out [T, H * V], x [T, hidden_size] -> [T, H * V]."""
        opened = self.ops.head_linear(by_heads(self.projection(x), 1), self.ones)
        return self.ops.gate(out, in_rows(opened), activation="sigmoid")


class HeadGatedAttention(Attention):
    """``out(attention * sigmoid(gate(x)))``.

    Args:
        gate_name: the checkpoint's module of the gates.
        arguments: of :class:`~headrace_models.layers.attention.self_attention.Attention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        gate_name: str = "g_proj",
        **arguments: Any,
    ) -> None:
        super().__init__(
            context,
            name,
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            **arguments,
        )
        self.gate = HeadGate(context, f"{name}.{gate_name}", hidden_size, num_heads, head_dim)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        out = in_rows(self.attend(*self.project(x), batch))
        return self.out(self.gate(out, x))


class HeadGatedMLA(MLAAttention):
    """``out(attention * sigmoid(gate(x)))`` of latent attention.

    Args:
        arguments: of :class:`~headrace_models.layers.attention.mla.MLAAttention`.
    """

    def __init__(self, context: BuildContext, name: str, sizes: MLASizes, **arguments: Any) -> None:
        super().__init__(context, name, sizes, **arguments)
        heads, size = sizes.num_heads, sizes.v_head_dim
        self.gate = HeadGate(context, f"{name}.g_proj", sizes.hidden_size, heads, size)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """out [T, H * V], x [T, hidden_size] -> [T, hidden_size]."""
        return self.out(self.gate(out, x))
