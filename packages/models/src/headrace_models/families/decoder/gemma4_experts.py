"""The experts of Gemma 4's mixtures, which work beside a dense MLP and read the stream before its norm.

Google 2026, Gemma 4. Letters: T tokens, H hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.moe.experts import Experts
from headrace_models.layers.moe.router import Router, Routing
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.rules.moe import stacked_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

EXPERT_RULES = (
    WeightRule("model.layers.{}.router.scale", "layers.{}.beside.router.norm.scale"),
    WeightRule("model.layers.{}.router.proj", "layers.{}.beside.router.choice"),
    WeightRule("model.layers.{}.router.per_expert_scale", "layers.{}.beside.router.factors.table"),
    WeightRule("model.layers.{}.post_feedforward_layernorm_1", "layers.{}.beside.dense_norm"),
    WeightRule("model.layers.{}.pre_feedforward_layernorm_2", "layers.{}.beside.input_norm"),
    WeightRule("model.layers.{}.post_feedforward_layernorm_2", "layers.{}.beside.output_norm"),
    *stacked_rules(
        "model.layers.{}.experts.gate_up_proj",
        "model.layers.{}.experts.down_proj",
        "layers.{}.beside.experts",
    ),
)


class ExpertsBeside(Layer):
    """``norm(dense) + norm(experts(norm(stream)))``.

    Args:
        name: of the block, as the checkpoint spells it.
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
        eps: float,
    ) -> None:
        self.ops, self.communicator = context.ops, context.communicator

        def norm(what: str) -> RMSNorm:
            return RMSNorm(context, f"{name}.{what}", hidden_size, eps)

        self.dense_norm = norm("post_feedforward_layernorm_1")
        self.input_norm = norm("pre_feedforward_layernorm_2")
        self.output_norm = norm("post_feedforward_layernorm_2")
        routing = Routing(num_experts, top_k, renormalise=True)
        self.router = NormedRouter(context, f"{name}.router", hidden_size, routing, eps)
        self.experts = Experts(
            context,
            [f"{name}.experts.{index}" for index in range(num_experts)],
            hidden_size,
            intermediate_size,
            activation,
        )

    def __call__(self, dense: Tensor, stream: Tensor) -> Tensor:
        """Results of the MLP [T, H], and the stream [T, H] before its norm -> [T, H]."""
        out = self.experts.summed(self.experts(self.input_norm(stream), *self.router(stream)))
        return self.ops.add(self.dense_norm(dense), self.output_norm(out))


class NormedRouter(Layer):
    """A norm, a choice by softmax, and a factor for each expert."""

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, routing: Routing, eps: float
    ) -> None:
        self.ops = context.ops
        self.norm = _RouterNorm(context, f"{name}.scale", hidden_size, eps)
        self.choice = Router(context, f"{name}.proj", hidden_size, routing)
        self.factors = _Factors(context, f"{name}.per_expert_scale", routing.num_experts)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights [T, k] float32, experts [T, k] int64."""
        weights, ids = self.choice(self.norm(x))
        return self.ops.gate(weights, self.factors(ids)), ids


class _RouterNorm(WeightLayer):
    """An RMS norm whose weight is a factor for each value, over the root of their number."""

    def __init__(self, context: BuildContext, name: str, size: int, eps: float) -> None:
        self.name, self.ops, self.size, self.eps = name, context.ops, size, eps

    def slots(self) -> Mapping[str, Slot]:
        return {"scale": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["scale"] * self.size**-0.5

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class _Factors(WeightLayer):
    """A number for each expert."""

    def __init__(self, context: BuildContext, name: str, num_experts: int) -> None:
        self.name, self.ops, self.num_experts = name, context.ops, num_experts

    def slots(self) -> Mapping[str, Slot]:
        return {"table": Slot((self.num_experts,), "float32", any_float=True)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.table = tensors["table"].view(-1, 1)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T, k] -> float32 of the same shape."""
        return self.ops.embedding(ids.reshape(-1), self.table).view(ids.shape)
