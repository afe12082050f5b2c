"""Latent attention whose heads are let through by a gate that each token opens, as Ling 3 has it. Qiu et
al. 2025, arXiv:2505.06708.

Letters: T tokens, H heads of this rank, V size of a head's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.latent_attention import LatentAttention, LatentSizes
from headrace_models.layers.linear import column_parallel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class GatedLatentAttention(LatentAttention):
    """``out(attention * sigmoid(gate(x)))``, one gate for each head.

    Args:
        arguments: of :class:`~headrace_models.layers.latent_attention.LatentAttention`.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: LatentSizes, **arguments: Any
    ) -> None:
        super().__init__(context, name, sizes, **arguments)
        self.gate = column_parallel(
            context,
            f"{name}.g_proj",
            sizes.hidden_size,
            (sizes.num_heads,),
            units=(sizes.num_heads,),
        )
        self.spread = Spread(context, f"{name}.g_proj", self.num_heads, sizes.v_head_dim)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """out [T, H * V], x [T, hidden_size] -> [T, hidden_size]."""
        return self.out(self.ops.gate(out, self.spread(self.gate(x)), activation="sigmoid"))


class Spread(WeightLayer):
    """Each head's number, once for each of its channels: a product with ones, as a step is captured
    from ops only."""

    def __init__(self, context: BuildContext, name: str, num_heads: int, size: int) -> None:
        self.name, self.ops = name, context.ops
        ones = torch.ones((num_heads, size, 1), dtype=getattr(torch, context.dtype))
        self.ones = context.ops.head_linear.pack(ones.to(context.device))

    def slots(self) -> Mapping[str, Slot]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing: all is known."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H * V]."""
        return in_rows(self.ops.head_linear(by_heads(x, 1), self.ones))
