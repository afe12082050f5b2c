"""A mixture of experts without gates, whose matrices lie in two tensors (nomic-embed-text-v2-moe).

Nussbaum and Duderstadt 2025, arXiv:2502.07972. Letters: T tokens, H hidden size, I intermediate size,
E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_core.ops import PackedLinear
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.head_view import in_every_row
from headrace_models.layers.linear import PlainLinear
from headrace_models.layers.mlp import MLPLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class UngatedMoE(MLPLayer):
    """``bias + sum over the k likeliest experts of p_e * down_e(act(up_e(x)))``, p from a softmax over
    all of them in float32, so that the k sum up to less than 1.

    Every rank holds all experts.
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
        self.packed: tuple[PackedLinear, PackedLinear] | None = None

    def slots(self) -> Mapping[str, Slot]:
        experts, inner, hidden = self.sizes
        both = Slot((experts * inner, hidden))
        return {"up": both, "down": both, "bias": Slot((hidden,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pack = self.ops.expert_linear.pack
        up, down = (tensors[key].view(self.sizes) for key in ("up", "down"))
        self.packed = pack(up), pack(down.transpose(1, 2).contiguous())
        self.bias = tensors["bias"]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights [T, k] float32, ids [T, k] -> [T, H]."""
        assert self.packed is not None, self.name
        up, down = self.packed
        inner = self.ops.activation(self.ops.expert_linear(x, up, ids), self.activation)
        out = self.ops.expert_linear(inner, down, ids, weights)
        return self.ops.add(out, in_every_row(self.bias, x.shape[0]))
