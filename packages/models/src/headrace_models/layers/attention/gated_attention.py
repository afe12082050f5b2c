"""Attention whose output is let through by a gate that each token opens. Qiu et al. 2025,
arXiv:2505.06708."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.head_view import in_rows
from headrace_models.layers.linear import column_parallel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class GatedAttention(Attention):
    """``out(attention * sigmoid(gate(x)))``, the gate of each head projected beside its query.

    Args:
        gate_name: the checkpoint's module of the gates, which has no bias; None: they are in the
            queries'.
        arguments: of :class:`~headrace_models.layers.attention.self_attention.Attention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        gate_name: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(
            context,
            name,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            **arguments,
        )
        names = ("q_proj", gate_name or "q_proj", "k_proj", "v_proj")
        units = (num_heads, num_heads, num_kv_heads, num_kv_heads)
        self.qkv = column_parallel(
            context,
            f"{name}.qkv_proj",
            hidden_size,
            tuple(count * head_dim for count in units),
            units=units,
            bias=qkv_bias,
            unbiased=() if gate_name is None else (1,),
            part_names=tuple(f"{name}.{part}" for part in names),
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        own, kv = self.spec.num_heads, self.spec.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, gate, key, value = torch.split(heads, [own, own, kv, kv], dim=1)
        out = self.attend(query, key, value, batch).flatten(1)
        return self.out(self.ops.gate(out, in_rows(gate), activation="sigmoid"))
