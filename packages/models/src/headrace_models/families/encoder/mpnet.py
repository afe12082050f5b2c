"""MPNet: BERT without segments, whose scores also know how far apart two tokens are.

Song et al. 2020, arXiv:2004.09297::

    x = norm(word + position)               positions begin at pad_token_id + 1
    h = norm(x + attention(x))              per block; scores + bias(distance, head)
    x = norm(h + down(gelu(up(h))))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.positions import first_position
from headrace_models.layers.attention.distance_bias import DistanceBias
from headrace_models.layers.attention.encoder_attention import EncoderAttention
from headrace_models.layers.encoder import PostNormBlock, PostNormEncoder
from headrace_models.layers.encoder_embeddings import TextEmbeddings
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.loading.rules.bert import UNUSED_HEADS
from headrace_models.pooling.classifier import (
    DENSE_RULES,
    OUT_RULE,
    Classifier,
    dense_classifier,
    token_classifier,
)

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


def _rules(prefix: str) -> tuple[WeightRule, ...]:
    layer = f"{prefix}encoder.layer.{{}}"
    return (
        WeightRule(f"{prefix}embeddings.word_embeddings", "embed.words"),
        WeightRule(f"{prefix}embeddings.position_embeddings", "embed.positions.rows"),
        WeightRule(f"{prefix}embeddings.LayerNorm", "embed.norm"),
        WeightRule(f"{prefix}encoder.relative_attention_bias", "distance_bias"),
        WeightRule(f"{layer}.attention.attn.q", "layers.{}.attention.qkv", part=0),
        WeightRule(f"{layer}.attention.attn.k", "layers.{}.attention.qkv", part=1),
        WeightRule(f"{layer}.attention.attn.v", "layers.{}.attention.qkv", part=2),
        WeightRule(f"{layer}.attention.attn.o", "layers.{}.attention.out"),
        WeightRule(f"{layer}.attention.LayerNorm", "layers.{}.attention_norm"),
        WeightRule(f"{layer}.intermediate.dense", "layers.{}.mlp.up"),
        WeightRule(f"{layer}.output.dense", "layers.{}.mlp.down"),
        WeightRule(f"{layer}.output.LayerNorm", "layers.{}.mlp_norm"),
    )


_ENCODER = (*_rules("mpnet."), *_rules(""))


class MPNetModel(PostNormEncoder):
    """The encoder alone; embeds."""

    weight_rules: ClassVar[Sequence[WeightRule]] = _ENCODER
    ignored_weights: ClassVar[Mapping[str, str]] = UNUSED_HEADS

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix or "mpnet.")

    def eps(self) -> float:
        return self.settings.number("layer_norm_eps", 1e-12)

    def make_embeddings(self, context: BuildContext, prefix: str) -> TextEmbeddings:
        name = f"{prefix}embeddings"
        return TextEmbeddings(
            context,
            (f"{name}.word_embeddings", f"{name}.position_embeddings", "", f"{name}.LayerNorm"),
            vocab_size=self.settings.integer("vocab_size"),
            size=self.hidden_size(),
            num_positions=self.settings.integer("max_position_embeddings", 512),
            first_position=first_position(context.config),
            eps=self.eps(),
        )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.distance_bias = DistanceBias(
            context,
            f"{prefix}encoder.relative_attention_bias",
            num_buckets=self.settings.integer("relative_attention_num_buckets", 32, minimum=4),
            num_heads=self.settings.integer("num_attention_heads"),
        )

    def make_block(self, context: BuildContext, index: int, prefix: str) -> PostNormBlock:
        hidden, name = self.hidden_size(), f"{prefix}encoder.layer.{index}"
        heads = self.settings.integer("num_attention_heads")
        return PostNormBlock(
            EncoderAttention(
                context,
                f"{name}.attention",
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=self.settings.head_dim(),
                rotary=None,
                qkv_bias=True,
                out_bias=True,
                qkv_name="attn",
                out_name="attn.o",
                part_names=("attn.q", "attn.k", "attn.v"),
                distance_bias=self.distance_bias,
            ),
            LayerNorm(context, f"{name}.attention.LayerNorm", hidden, self.eps()),
            MLP(
                context,
                f"{name}.intermediate.dense",
                f"{name}.output.dense",
                hidden,
                self.settings.integer("intermediate_size"),
                self.settings.activation("hidden_act"),
            ),
            LayerNorm(context, f"{name}.output.LayerNorm", hidden, self.eps()),
        )


class MPNetForSequenceClassification(MPNetModel):
    """Labels of the first token, by RoBERTa's head."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, *DENSE_RULES)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return dense_classifier(context, self.hidden_size())


class MPNetForTokenClassification(MPNetModel):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*_ENCODER, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
