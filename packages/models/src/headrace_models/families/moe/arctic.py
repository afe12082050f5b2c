"""Arctic: every second block has a mixture of experts beside its attention and a small MLP behind it.

Snowflake 2024, Arctic (dense-MoE hybrid).

Block: Llama's, or ``h = x + attention(norm(x)); h + residual_mlp(norm(h)) + experts(norm(x))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.norm import NormLayer
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


_LAYER, _OWN = "model.layers.{}", "layers.{}"
_MOE = f"{_LAYER}.block_sparse_moe"


def _mlp_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    gate, up, down = (f"{source}.{name}" for name in EXPERT_NAMES)
    return (
        WeightRule(gate, f"{target}.gate_up", part=0),
        WeightRule(up, f"{target}.gate_up", part=1),
        WeightRule(down, f"{target}.down"),
    )


class ArcticBlock(Block):
    """``h = x + attention(norm(x)); h + residual_mlp(residual_norm(h)) + mlp(mlp_norm(x))``: the mixture
    reads what the block gets."""

    def __init__(
        self,
        ops: OpTable,
        input_norm: NormLayer,
        attention: SelfAttention,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        residual_norm: NormLayer,
        residual_mlp: MLPLayer,
    ) -> None:
        self.ops = ops
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.residual_norm = residual_norm
        self.residual_mlp = residual_mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        mixed = self.mlp(self.mlp_norm(stream))
        x, stream = self.residual_norm.add(self.attention(x, batch), stream)
        return self.ops.add(self.residual_mlp(x), mixed), stream


class ArcticForCausalLM(MoEDecoder):
    """Arctic base and instruct."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".mlp." not in rule.target),
        WeightRule(f"{_LAYER}.residual_layernorm", f"{_OWN}.residual_norm"),
        *_mlp_rules(f"{_LAYER}.residual_mlp", f"{_OWN}.residual_mlp"),
        *_mlp_rules(f"{_MOE}.mlp", f"{_OWN}.mlp"),
        *router_rules(f"{_MOE}.gate"),
        *expert_rules(f"{_MOE}.experts", names=EXPERT_NAMES),
    )
    default_theta: ClassVar[float] = 1e6
    default_eps: ClassVar[float] = 1e-5

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        """The config's switch for the small MLP goes for blocks with a mixture only."""
        if self.is_dense(index) or not self._is_hybrid():
            return super().make_block(context, index, name)
        return ArcticBlock(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.residual_layernorm"),
            self._gated(context, f"{name}.residual_mlp", self.hidden_size()),
        )

    def _is_hybrid(self) -> bool:
        residual = self.settings.flag("use_residual", True)
        return self.settings.flag("parallel_attn_mlp_res", residual)

    def is_dense(self, index: int) -> bool:
        return (index + 1) % self.settings.integer("moe_layer_frequency", 2) != 0

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context, name, sliding_window=self.settings.optional_integer("sliding_window")
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        name = name.removesuffix("mlp") + "block_sparse_moe"
        if self.is_dense(index):
            return self._gated(context, f"{name}.mlp", self.expert_size(index))
        return self.make_mixture(context, index, name, expert_names=EXPERT_NAMES)

    def _gated(self, context: BuildContext, name: str, size: int) -> GatedMLP:
        gate, up, down = EXPERT_NAMES
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            size,
            self.gate(),
            part_names=(gate, up),
            down_name=down,
        )

    def routing(self, index: int) -> Routing:
        top_k = self.settings.integer("num_experts_per_tok", 2)
        return Routing(
            num_experts=self.settings.integer("num_local_experts", maximum=MAX_EXPERTS),
            top_k=top_k,
            renormalise=top_k > 1,
        )

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")
