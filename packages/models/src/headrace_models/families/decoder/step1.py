"""Step 1, the language model of Step-Audio: Llama without positions but ALiBi by the root of the distance.

StepFun 2025, arXiv:2502.11946.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace_core.attention import ALIBI_SQRT
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.alibi import alibi_slopes
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Step1ForCausalLM(LlamaDecoder):
    """Step-Audio-Chat, Step-Audio-TTS-3B, Step-Audio-EditX."""

    default_eps: ClassVar[float] = 1e-5
    spelling: ClassVar[Spelling] = {"num_key_value_heads": ("num_attention_groups",)}

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.rotary = None
        self.slopes = alibi_slopes(self.settings.integer("num_attention_heads"))

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context,
            name,
            alibi_slopes=self.slopes,
            extras={"alibi_sqrt": True},
            features={ALIBI_SQRT},
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act", default="silu"),
        )
