"""A mixture of experts without gates, whose matrices lie in two tensors (nomic-embed-text-v2-moe).

Nussbaum and Duderstadt 2025, arXiv:2502.07972. Letters: T tokens, H hidden size, I intermediate size,
E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.linear import PlainLinear
from headrace_models.layers.mlp import MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class UngatedMoE(MLPLayer):
    """``bias + sum over the k likeliest experts of p_e * down_e(act(up_e(x)))``, p from a softmax over
    all of them in float32, so that the k sum up to less than 1.

    Every rank holds all experts. Which rows an expert gets depends on contents, so steps are not
    captured.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        activation: str,
    ) -> None:
        if top_k > num_experts:
            raise UnsupportedModel(
                f"config.json: moe_top_k = {top_k}: must be at most {num_experts} experts"
            )
        self.ops = context.ops
        self.top_k = top_k
        self.router = PlainLinear(context, f"{name}.router.layer", hidden_size, num_experts)
        sizes = (num_experts, intermediate_size, hidden_size)
        self.experts = UngatedExperts(context, f"{name}.experts", sizes, activation)

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x)  # [T, E]
        weights, ids = self.ops.route_experts(scores, self.top_k)
        return self.experts(x, weights, ids)


class UngatedExperts(WeightLayer):
    """The experts' weights, and one bias for their sum.

    Args:
        sizes: E, I, H.
    """

    bias: Tensor

    def __init__(
        self, context: BuildContext, name: str, sizes: tuple[int, int, int], activation: str
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.sizes, self.activation = sizes, activation
        self.packed: list[tuple[PackedLinear, PackedLinear]] = []

    def slots(self) -> Mapping[str, Slot]:
        experts, inner, hidden = self.sizes
        both = Slot((experts * inner, hidden))
        return {"up": both, "down": both, "bias": Slot((hidden,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pack = self.ops.linear.pack
        ups, downs = (tensors[key].view(self.sizes) for key in ("up", "down"))
        self.packed = [(pack(up), pack(down.T.contiguous())) for up, down in zip(ups, downs)]
        self.bias = tensors["bias"].float()

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights [T, k] float32, ids [T, k] -> [T, H]. A row's experts are summed in the
        order of their ids, whatever the other rows are."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, (up, down) in enumerate(self.packed):
            rows, places = (ids == expert).nonzero(as_tuple=True)
            if rows.shape[0]:
                inner = self.ops.linear.activated(x[rows], up, self.activation)
                out = self.ops.linear(inner, down).float()
                total[rows] += out * weights[rows, places, None]
        return (total + self.bias).to(x.dtype)
