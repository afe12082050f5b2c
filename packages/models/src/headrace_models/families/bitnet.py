"""BitNet b1.58: Llama with a norm before the last projection of each half, trained with ternary weights.

Ma et al. 2024, arXiv:2402.17764; Wang et al. 2025, arXiv:2504.12285. How weights are stored is the
quantization method ``bitnet``'s affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.llama import RULES, LlamaForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.sub_norms import SubNormedAttention, SubNormedMLP

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class BitNetForCausalLM(LlamaForCausalLM):
    """microsoft/bitnet-b1.58-2B-4T."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.self_attn.attn_sub_norm", "layers.{}.attention.sub_norm"),
        WeightRule("model.layers.{}.mlp.ffn_sub_norm", "layers.{}.mlp.sub_norm"),
    )
    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        return SubNormedAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            num_kv_heads=self.settings.num_kv_heads(),
            head_dim=self.head_dim(),
            rotary=self.rotary,
            qkv_bias=bias,
            out_bias=bias,
            norm_eps=self.norm_eps(),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return SubNormedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act", default="relu2"),
            norm_eps=self.norm_eps(),
        )
