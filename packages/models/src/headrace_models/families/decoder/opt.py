"""OPT, and Galactica: learned positions, ReLU; 350M has its norms behind its halves, and a smaller
embedding.

Zhang et al. 2022, arXiv:2205.01068.

Block: Llama's; in 350M ``h = norm(x + attention(x)); norm(h + mlp(h))``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import NormedSumBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.gpt import GPTDecoder, Names, without_prefix
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm, NoNorm, NormLayer
from headrace_models.layers.positions import FAIRSEQ_FIRST_POSITION, LearnedPositions

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="model.decoder.embed_tokens",
    blocks="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    head="lm_head",
    input_norm="self_attn_layer_norm",
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
    positions="model.decoder.embed_positions",
)
_NORMED_SUMS = (
    WeightRule("model.decoder.layers.{}.self_attn_layer_norm", "layers.{}.attention_norm"),
    WeightRule("model.decoder.project_in", "project_in"),
    WeightRule("model.decoder.project_out", "project_out"),
)
RULES = (*NAMES.rules(), *_NORMED_SUMS)


class OPTForCausalLM(GPTDecoder):
    """OPT 125M to 66B. The first files lack the prefix ``model.``."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (*RULES, *without_prefix(RULES, "model."))
    spelling: ClassVar[Spelling] = {
        "intermediate_size": ("ffn_dim",),
        "hidden_act": ("activation_function",),
    }
    ties_embeddings: ClassVar[bool] = True
    default_activation: ClassVar[str | None] = "relu"

    def embedding_size(self) -> int:
        return self.settings.integer("word_embed_proj_dim", self.hidden_size())

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        small, hidden = self.embedding_size(), self.hidden_size()
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if small != hidden:
            if context.pooling is not None:
                raise UnsupportedModel(
                    f"config.json: word_embed_proj_dim = {small}: must be hidden_size = {hidden} for a "
                    "model that pools"
                )
            name = f"{prefix}model.decoder"
            self.project_in = Linear(context, f"{name}.project_in", small, [Part(hidden)])
            self.project_out = Linear(context, f"{name}.project_out", hidden, [Part(small)])

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions:
        return self.learned_positions(context, prefix, default=2048, skip=FAIRSEQ_FIRST_POSITION)

    def token_vectors(self, ids: Tensor) -> Tensor:
        vectors = self.embed(ids)
        return vectors if self.project_in is None else self.project_in(vectors)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        small = hidden if self.project_out is None else self.project_out(hidden)
        return super().compute_logits(small)

    def norms_first(self) -> bool:
        return self.settings.flag("do_layer_norm_before", True)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        if self.norms_first():
            return super().make_block(context, index, name)
        return NormedSumBlock(
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_mlp(context, index, name),
            self.make_norm(context, f"{name}.{self.names.mlp_norm}"),
        )

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        """Galactica's have neither weight nor bias."""
        affine = self.settings.flag("layer_norm_elementwise_affine", True)
        eps = self.norm_eps()
        return LayerNorm(context, name, self.hidden_size(), eps, weight=affine, bias=affine)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer | NoNorm:
        if not self.norms_first():
            return NoNorm()
        self.settings.refuse("_remove_final_layer_norm", False)
        return super().make_final_norm(context, prefix)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("enable_bias", True)
        return self.attention(context, name, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.mlp(context, name, bias=self.settings.flag("enable_bias", True))
