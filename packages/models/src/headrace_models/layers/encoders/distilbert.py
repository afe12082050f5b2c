"""DistilBERT's encoder: BERT's post-norm blocks under other names, without segments.

Sanh et al. 2019, arXiv:1910.01108.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS
from headrace_models.layers.attention.encoder_attention import EncoderAttention
from headrace_models.layers.encoder import PostNormBlock, PostNormEncoder
from headrace_models.layers.encoder_embeddings import TextEmbeddings
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_EPS = 1e-12


def _rules(prefix: str) -> tuple[WeightRule, ...]:
    layer = f"{prefix}transformer.layer.{{}}"
    return (
        WeightRule(f"{prefix}embeddings.word_embeddings", "embed.words"),
        WeightRule(f"{prefix}embeddings.position_embeddings", "embed.positions.rows"),
        WeightRule(f"{prefix}embeddings.LayerNorm", "embed.norm"),
        WeightRule(f"{layer}.attention.q_lin", "layers.{}.attention.qkv", part=0),
        WeightRule(f"{layer}.attention.k_lin", "layers.{}.attention.qkv", part=1),
        WeightRule(f"{layer}.attention.v_lin", "layers.{}.attention.qkv", part=2),
        WeightRule(f"{layer}.attention.out_lin", "layers.{}.attention.out"),
        WeightRule(f"{layer}.sa_layer_norm", "layers.{}.attention_norm"),
        WeightRule(f"{layer}.ffn.lin1", "layers.{}.mlp.up"),
        WeightRule(f"{layer}.ffn.lin2", "layers.{}.mlp.down"),
        WeightRule(f"{layer}.output_layer_norm", "layers.{}.mlp_norm"),
    )


DISTILBERT_RULES = (*_rules("distilbert."), *_rules(""))


class DistilBertEncoder(PostNormEncoder):
    """``norm(word + position)``, then blocks of ``h = norm(x + attention(x)); norm(h + mlp(h))``.

    Families add their heads.
    """

    weight_rules: ClassVar[Sequence[WeightRule]] = DISTILBERT_RULES
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"vocab_(transform|layer_norm|projector)\..*": "the head of the pre-training",
        r"(pre_)?classifier\..*": "labels, of a checkpoint that is to embed",
    }

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix or "distilbert.")

    def hidden_size(self) -> int:
        return self.settings.integer("dim")

    def num_layers(self) -> int:
        return self.settings.integer("n_layers", maximum=MAX_LAYERS)

    def make_embeddings(self, context: BuildContext, prefix: str) -> TextEmbeddings:
        name = f"{prefix}embeddings"
        return TextEmbeddings(
            context,
            (f"{name}.word_embeddings", f"{name}.position_embeddings", "", f"{name}.LayerNorm"),
            vocab_size=self.settings.integer("vocab_size"),
            size=self.hidden_size(),
            num_positions=self.settings.integer("max_position_embeddings", 512),
            eps=_EPS,
        )

    def make_block(self, context: BuildContext, index: int, prefix: str) -> PostNormBlock:
        hidden, name = self.hidden_size(), f"{prefix}transformer.layer.{index}"
        heads = self.settings.integer("n_heads")
        if hidden % heads:
            raise UnsupportedModel(
                f"config.json: dim = {hidden}: must be a multiple of n_heads = {heads}"
            )
        return PostNormBlock(
            EncoderAttention(
                context,
                f"{name}.attention",
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=hidden // heads,
                rotary=None,
                qkv_bias=True,
                out_bias=True,
                qkv_name="qkv_lin",
                out_name="out_lin",
                part_names=("q_lin", "k_lin", "v_lin"),
            ),
            LayerNorm(context, f"{name}.sa_layer_norm", hidden, _EPS),
            MLP(
                context,
                f"{name}.ffn.lin1",
                f"{name}.ffn.lin2",
                hidden,
                self.settings.integer("hidden_dim"),
                self.settings.activation("activation"),
            ),
            LayerNorm(context, f"{name}.output_layer_norm", hidden, _EPS),
        )
