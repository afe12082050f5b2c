"""GPT-J: both halves of a block read one norm, neighbouring dimensions turn, the head has a bias.

Wang and Komatsuzaki 2021, "GPT-J-6B: a 6 billion parameter autoregressive language model".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.gpt_shape import GPT2_KEYS, GPTDecoder, Names
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.blocks import ParallelBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.rotary import rotary_table
from headrace_models.rope import rope_settings
from headrace_models.settings import Spelling

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.wte",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    input_norm="ln_1",
    attention="attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
)


class GPTJForCausalLM(GPTDecoder):
    """GPT-J 6B."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"transformer\.h\.\d+\.attn\.(masked_bias|bias|causal_mask)": "the causal mask"
    }
    spelling: ClassVar[Spelling] = GPT2_KEYS
    head_bias: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "gelu_new"

    def make_rotary(self, context: BuildContext) -> Tensor:
        """The config says how many dimensions turn, not which share of them."""
        head_dim = self.settings.head_dim()
        turning = self.settings.integer("rotary_dim", min(64, head_dim), maximum=head_dim)
        rope = replace(rope_settings(self.settings.config), partial_rotary_factor=1.0)
        return rotary_table(context, rope, turning)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return ParallelBlock(
            context.ops,
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_mlp(context, index, name),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, interleaved=True)
