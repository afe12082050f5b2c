"""Weight-name rules of BERT's module tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace_core.model import WeightRule

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
