"""GPT-NeoX, Pythia, Dolly, RedPajama: fused projections stored head by head, a quarter of each head turns.

Black et al. 2022, arXiv:2204.06745.

Block: ``x + attention(norm(x)) + mlp(norm(x))``, of two norms; sequential halves if the config says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import ParallelBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gpt import GPTDecoder, Names

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="gpt_neox.embed_in",
    blocks="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    input_norm="input_layernorm",
    attention="attention",
    qkv=("query_key_value",),
    out="dense",
    mlp_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
KEYS = {"partial_rotary_factor": ("rotary_pct",), "rope_theta": ("rotary_emb_base",)}


class GPTNeoXForCausalLM(GPTDecoder):
    """Both halves of a block read the same stream, unless ``use_parallel_residual`` is false."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules(groups=EACH_KV_HEAD)
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias": "the causal mask"
    }
    spelling: ClassVar[Spelling] = KEYS
    default_partial_rotary: ClassVar[float] = 0.25
    default_activation: ClassVar[str | None] = "gelu"

    def make_rotary(self, context: BuildContext) -> Tensor:
        return self.rotary_of_config(context)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        if not self.settings.flag("use_parallel_residual", True):
            return super().make_block(context, index, name)
        return ParallelBlock(
            context.ops,
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_mlp(context, index, name),
            self.make_norm(context, f"{name}.{self.names.mlp_norm}"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", True)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias)
