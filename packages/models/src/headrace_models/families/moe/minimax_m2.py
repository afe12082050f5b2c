"""MiniMax-M2: Mixtral's names, routing by corrected sigmoids, norms over whole queries and keys.

MiniMax 2025, MiniMax-M2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import by_rotary_dim, rope_settings
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import whole_norms
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, RULES
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_MLP = "model.layers.{}.block_sparse_moe"


class MiniMaxM2ForCausalLM(MoEDecoder):
    """MiniMax-M2, M2.1."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = ((r"\.mlp\.", ".block_sparse_moe."),)
    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".mlp." not in rule.target),
        *HEAD_NORM_RULES,
        *router_rules(f"{_MLP}.gate", f"{_MLP}.e_score_correction_bias"),
        *expert_rules(f"{_MLP}.experts", names=EXPERT_NAMES),
        # as transformers 5 calls them
        *router_rules(correction="model.layers.{}.mlp.e_score_correction_bias"),
        *expert_rules(),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"model\.mtp\..*": "predicts several tokens at once"
    }
    mixture: ClassVar[Mapping[str, Any]] = {"corrected": True, "expert_names": EXPERT_NAMES}
    default_theta: ClassVar[float] = 5e6

    def prepare(self, context: BuildContext, prefix: str) -> None:
        """The config says how many dimensions of a head turn."""
        size = self.head_dim()
        limit = self.settings.integer("max_position_embeddings", 2048)
        rope = rope_settings(by_rotary_dim(context.config, size), theta=self.default_theta)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context,
            name,
            **whole_norms(self, context, name),
        )

    def routing(self, index: int) -> Routing:
        return Routing(
            num_experts=self.settings.integer("num_local_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok"),
            scoring="sigmoid",
            renormalise=True,
        )

    def expert_size(self, index: int) -> int:
        return self.settings.integer("intermediate_size")

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.make_mixture(context, index, name.removesuffix("mlp") + "block_sparse_moe")
