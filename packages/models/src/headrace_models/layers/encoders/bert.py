"""BERT's encoder, of which BERT, RoBERTa, ELECTRA and the models with other heads on them are made.

Devlin et al. 2018, arXiv:1810.04805. Post-norm blocks on learned positions and segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_models.config.positions import first_position
from headrace_models.layers.attention.encoder_attention import EncoderAttention
from headrace_models.layers.encoder import PostNormBlock, PostNormEncoder
from headrace_models.layers.encoder_embeddings import TextEmbeddings
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.loading.rules.bert import UNUSED_HEADS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class BertEncoder(PostNormEncoder):
    """``norm(word + position + segment)``, then blocks of ``h = norm(x + attention(x)); norm(h + mlp(h))``.

    Families add their weight rules and their heads.
    """

    ignored_weights: ClassVar[Mapping[str, str]] = UNUSED_HEADS
    base_name: ClassVar[str]
    """The checkpoint's name of the encoder within a model with a head."""
    positions_after_padding: ClassVar[bool] = False
    """True if the first token's position is the padding token's id plus 1 (RoBERTa)."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        kind = context.config.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise UnsupportedModel(
                f"config.json: position_embedding_type = {kind!r}: must be absolute"
            )
        super().__init__(context, prefix or f"{self.base_name}.")

    def eps(self) -> float:
        return self.settings.number("layer_norm_eps", 1e-12)

    def embedding_size(self) -> int:
        return self.hidden_size()

    def make_embeddings(self, context: BuildContext, prefix: str) -> TextEmbeddings:
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
            size=self.embedding_size(),
            num_positions=self.settings.integer("max_position_embeddings", 512),
            first_position=first_position(context.config) if self.positions_after_padding else 0,
            num_segments=self.settings.integer("type_vocab_size", 2),
            eps=self.eps(),
        )

    def make_block(self, context: BuildContext, index: int, prefix: str) -> PostNormBlock:
        name, hidden = f"{prefix}encoder.layer.{index}", self.hidden_size()
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
