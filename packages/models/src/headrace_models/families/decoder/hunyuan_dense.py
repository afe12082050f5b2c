"""Hunyuan, dense: Llama with head norms behind the rotation, whose base is stretched once for all.

Tencent 2025, Hunyuan-7B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.rules.llama import RULES

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class HunYuanDenseV1ForCausalLM(LlamaDecoder):
    """Hunyuan 0.5B to 7B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        WeightRule("model.layers.{}.self_attn.query_layernorm", "layers.{}.attention.query_norm"),
        WeightRule("model.layers.{}.self_attn.key_layernorm", "layers.{}.attention.key_norm"),
    )
    default_eps: ClassVar[float] = 1e-5

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        size, eps = self.head_dim(), self.norm_eps()
        return self.attention(
            context,
            name,
            qkv_bias=bias,
            out_bias=bias,
            query_norm=RMSNorm(context, f"{name}.query_layernorm", size, eps),
            key_norm=RMSNorm(context, f"{name}.key_layernorm", size, eps),
            norm_after_rotary=True,
        )
