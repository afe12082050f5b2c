"""BERT: learned positions, segments, post-norm blocks (MiniLM, E5, BGE, arctic-embed, ...).

Devlin et al. 2018, arXiv:1810.04805.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.encoder import Embeddings, EncoderBlock, PostNormBlock, PostNormEncoder
from headrace_models.layers.encoder_attention import EncoderAttention
from headrace_models.layers.encoder_embeddings import TextEmbeddings
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.pooling.classifier import OUT_RULE, Classifier, HeadLinear, token_classifier
from headrace_models.pooling.labels import num_labels

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

UNUSED_HEADS: Mapping[str, str] = {
    r"cls\..*": "heads of the pre-training",
    r"lm_head\..*": "the head of the pre-training",
    r"(.*\.)?pooler\..*": "made for guessing the next sentence",
    r"classifier\..*": "labels, of a checkpoint that is to embed",
}
"""Tensors that checkpoints of this line hold for other tasks."""


def encoder_rules(prefix: str) -> tuple[WeightRule, ...]:
    """Names below ``prefix`` of BERT and of what has its module tree."""
    layer = f"{prefix}encoder.layer.{{}}"
    rules = (
        WeightRule(f"{prefix}embeddings.word_embeddings", "embed.words"),
        WeightRule(f"{prefix}embeddings.position_embeddings", "embed.positions.rows"),
        WeightRule(f"{prefix}embeddings.token_type_embeddings", "embed.segments"),
        WeightRule(f"{prefix}embeddings.token_type_embeddings", "embed.positions.segment"),
        WeightRule(f"{prefix}embeddings.LayerNorm", "embed.norm"),
        WeightRule(f"{layer}.attention.self.query", "layers.{}.attention.qkv", part=0),
        WeightRule(f"{layer}.attention.self.key", "layers.{}.attention.qkv", part=1),
        WeightRule(f"{layer}.attention.self.value", "layers.{}.attention.qkv", part=2),
        WeightRule(f"{layer}.attention.output.dense", "layers.{}.attention.out"),
        WeightRule(f"{layer}.attention.output.LayerNorm", "layers.{}.attention_norm"),
        WeightRule(f"{layer}.intermediate.dense", "layers.{}.mlp.up"),
        WeightRule(f"{layer}.output.dense", "layers.{}.mlp.down"),
        WeightRule(f"{layer}.output.LayerNorm", "layers.{}.mlp_norm"),
    )
    return (*rules, *_old_norms(rules))


def _old_norms(rules: Sequence[WeightRule]) -> list[WeightRule]:
    """The first checkpoints call a norm's weight and bias as the paper on norms does."""
    return [
        WeightRule(f"{rule.source}.{old}", f"{rule.target}.{new}")
        for rule in rules
        if rule.source.endswith("LayerNorm")
        for old, new in (("gamma", "weight"), ("beta", "bias"))
    ]


class BertModel(PostNormEncoder):
    """The reference shape; families that differ in a detail override its method."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*encoder_rules("bert."), *encoder_rules(""))
    ignored_weights: ClassVar[Mapping[str, str]] = UNUSED_HEADS
    base_name: ClassVar[str] = "bert"
    """The checkpoint's name of the encoder within a model with a head."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        kind = context.config.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise UnsupportedModel(
                f"config.json: position_embedding_type = {kind!r}: must be absolute"
            )
        super().__init__(context, prefix or f"{self.base_name}.")

    def make_embeddings(self, context: BuildContext, prefix: str) -> Embeddings:
        return self.text_embeddings(context, prefix)

    def text_embeddings(
        self,
        context: BuildContext,
        prefix: str,
        *,
        first_position: int = 0,
        size: int | None = None,
    ) -> TextEmbeddings:
        """Tables of the config's sizes."""
        name = f"{prefix}embeddings"
        return TextEmbeddings(
            context,
            (
                f"{name}.word_embeddings",
                f"{name}.position_embeddings",
                f"{name}.token_type_embeddings",
                f"{name}.LayerNorm",
            ),
            vocab_size=self.settings.integer("vocab_size"),
            size=size or self.hidden_size(),
            num_positions=self.settings.integer("max_position_embeddings", 512),
            first_position=first_position,
            num_segments=self.settings.integer("type_vocab_size", 2),
            eps=self.eps(),
        )

    def eps(self) -> float:
        return self.settings.number("layer_norm_eps", 1e-12)

    def make_block(self, context: BuildContext, index: int, prefix: str) -> EncoderBlock:
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
                qkv_name="self",
                out_name="output.dense",
                part_names=("self.query", "self.key", "self.value"),
            ),
            LayerNorm(context, f"{name}.attention.output.LayerNorm", hidden, self.eps()),
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


class BertForSequenceClassification(BertModel):
    """Labels of the first token, through the pre-training's pooler; cross-encoders."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *BertModel.weight_rules,
        WeightRule("bert.pooler.dense", "pooler.head.classifier.dense"),
        WeightRule("pooler.dense", "pooler.head.classifier.dense"),
        OUT_RULE,
    )

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        hidden, labels = self.hidden_size(), num_labels(context.config)
        dense = HeadLinear(context, f"{prefix}pooler.dense", hidden, hidden)
        return Classifier(HeadLinear(context, "classifier", hidden, labels), dense)


class BertForTokenClassification(BertModel):
    """Labels of each token."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (*BertModel.weight_rules, OUT_RULE)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier | None:
        return token_classifier(context, self.hidden_size())
