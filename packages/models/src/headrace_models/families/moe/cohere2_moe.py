"""Cohere's mixtures of experts: Command A's blocks, the first of them dense. Cohere 2026.

Block: ``x + attention(norm(x)) + experts(norm(x))``, both of one norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import ParallelBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.moe import MoEDecoder, is_dense_by_list
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import LayerNorm
from headrace_models.loading.rules.llama import PARALLEL_RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class AveragedMoE(SparseMoE):
    """The mean of the routed experts' sum and the shared one."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.scale(super().__call__(x), 0.5)


class Cohere2MoeForCausalLM(MoEDecoder):
    """Command with mixtures of experts."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *PARALLEL_RULES,
        *router_rules(),
        *expert_rules(),
        *shared_rules(),
    )

    ties_embeddings: ClassVar[bool] = True

    def logits_multiplier(self) -> float:
        return self.settings.number("logit_scale", 0.0625)

    def norm_eps(self) -> float:
        return self.settings.number("layer_norm_eps", 1e-5)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps(), bias=False)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ParallelBlock(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def dense_layers(self) -> int:
        """Number of first layers that are dense if the config does not say of which kind each layer is."""
        return self.settings.integer("first_k_dense_replace", 0, minimum=0)

    def is_dense(self, index: int) -> bool:
        return is_dense_by_list(self.settings, index, self.dense_layers())

    def is_sliding(self, index: int) -> bool:
        kinds, first = self.settings.layer_types(), self.dense_layers()
        if kinds is not None:
            return kinds[index] == "sliding_attention"
        if index < first:
            return (index + 1) % self.settings.integer(
                "prefix_dense_sliding_window_pattern", 1
            ) != 0
        period = self.settings.integer("sliding_window_pattern", 4)
        return (index - first + 1) % period != 0

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """Positions where there are windows, and in the dense layers."""
        self.settings.refuse("rms_norm_eps")
        bias, sliding = self.settings.flag("attention_bias", False), self.is_sliding(index)
        every = self.settings.integer("prefix_dense_sliding_window_pattern", 1)
        turns = sliding or (self.is_dense(index) and every == 1)
        return self.attention(
            context,
            name,
            rotary=self.rotary if turns else None,
            interleaved=True,
            sliding_window=self.settings.integer("sliding_window", 4096) if sliding else None,
            qkv_bias=bias,
            out_bias=bias,
        )

    def routing(self, index: int) -> Routing:
        scoring = self.settings.config.get("expert_selection_fn") or "softmax"
        if scoring not in ("softmax", "sigmoid"):
            raise UnsupportedModel(
                f"config.json: expert_selection_fn = {scoring!r:.200}: must be softmax or sigmoid"
            )
        return Routing(
            num_experts=self.settings.integer("num_experts", 8, maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 2),
            scoring=scoring,
            # A softmax is over the chosen ones.
            renormalise=scoring == "softmax" or self.settings.flag("norm_topk_prob", True),
        )

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def shared_size(self, index: int) -> int:
        count = self.settings.integer("num_shared_experts", 0, minimum=0)
        return self.expert_size(index) * count

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if not self.is_dense(index):
            return self.make_mixture(context, index, name)
        size = self.settings.integer("prefix_dense_intermediate_size")
        act = self.settings.activation("hidden_act")
        return GatedMLP(context, name, self.hidden_size(), size, act)

    def mixture_class(self) -> type[SparseMoE]:
        self.settings.refuse("shared_expert_combination_strategy", "sum", "average")
        sums = self.settings.config.get("shared_expert_combination_strategy") == "sum"
        return SparseMoE if sums or not self.shared_size(0) else AveragedMoE
