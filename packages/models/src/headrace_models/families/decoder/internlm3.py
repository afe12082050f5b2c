"""InternLM 3: Llama whose config has one key for the biases of query, key and value and one for all others.

InternLM Team 2025, internlm3-8b-instruct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class InternLM3ForCausalLM(LlamaDecoder):
    """transformers 5 writes ``attention_bias`` and ``mlp_bias``, the publisher ``qkv_bias`` and ``bias``."""

    spelling: ClassVar[Spelling] = {"attention_bias": ("qkv_bias",), "mlp_bias": ("bias",)}

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        qkv, others = (self.settings.flag(f"{what}_bias", False) for what in ("attention", "mlp"))
        return self.attention(context, name, qkv_bias=qkv, out_bias=others)
