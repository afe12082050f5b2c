"""Encoder shared by the rotary descendants of BERT: its post-norm blocks and its segments, with rotation in
place of learned positions (NomicBert, GTE, Jina v3)."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.layers.attention.encoder_attention import EncoderAttention
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.encoder import Embeddings, EncoderBlock, PostNormBlock, PostNormEncoder
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.layers.vocabulary import vocab_shard
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.bert import UNUSED_HEADS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class OnlySegment(WeightLayer):
    """The row that all tokens get where there is but one segment: part of the words' table once both
    are loaded."""

    def __init__(self, words: Embedding, segments: Embedding) -> None:
        self.name = segments.name
        self.tables = (words, segments)  # in a tuple: they are another layer's pieces

    def slots(self) -> Mapping[str, Slot]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        words, segments = self.tables
        words.weight += segments.weight[0]


class SegmentEmbeddings(Embeddings):
    """``norm(word + segment)``.

    Args:
        names: the checkpoint's names of the word and segment tables and of the norm.
        num_segments: rows of the segment table; 0: there is none.
    """

    def __init__(
        self,
        context: BuildContext,
        names: tuple[str, str, str],
        *,
        vocab_size: int,
        size: int,
        num_segments: int,
        eps: float,
    ) -> None:
        word, segment, norm = names
        shard = vocab_shard(vocab_size, context.communicator)
        self.words = Embedding(context, word, vocab_size, size, shard=shard)
        self.segments = Embedding(context, segment, num_segments, size) if num_segments else None
        self.only = (
            OnlySegment(self.words, self.segments)
            if self.segments is not None and num_segments == 1
            else None
        )
        self.norm = LayerNorm(context, norm, size, eps)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        words = self.words(batch.input_ids)
        if self.segments is None or self.only is not None:
            return self.norm(words)
        assert batch.token_type_ids is not None
        x, _ = self.norm.add(words, self.segments(batch.token_type_ids))
        return x


class LayerNames(NamedTuple):
    """Names of a layer's parts in one kind of checkpoint."""

    layer: str
    """Name of a layer, with ``{}`` for the index."""
    qkv: str | tuple[str, str, str]
    """One module, or three."""
    out: str
    attention_norm: str
    mlp_norm: str


SPLIT_NAMES = LayerNames(
    "layers.{}",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)
"""Names of these families in transformers."""


def encoder_rules(
    prefixes: Sequence[str], names: LayerNames, mlp: Sequence[WeightRule], *, norm: str
) -> tuple[WeightRule, ...]:
    """Weight rules of one kind of checkpoint.

    Args:
        prefixes: that all names may have.
        mlp: rules of the feed-forward layer, from and to below a layer.
        norm: name of the norm behind the embeddings.
    """
    layer, ours = names.layer, "layers.{}"
    fused = isinstance(names.qkv, str)
    rules = [
        WeightRule("embeddings.word_embeddings", "embed.words"),
        WeightRule("embeddings.token_type_embeddings", "embed.segments"),
        WeightRule(norm, "embed.norm"),
        WeightRule(f"{layer}.{names.out}", f"{ours}.attention.out"),
        WeightRule(f"{layer}.{names.attention_norm}", f"{ours}.attention_norm"),
        WeightRule(f"{layer}.{names.mlp_norm}", f"{ours}.mlp_norm"),
    ]
    for part, name in enumerate((names.qkv,) if isinstance(names.qkv, str) else names.qkv):
        split = ALL_PARTS if fused else None
        target = f"{ours}.attention.qkv"
        rules.append(WeightRule(f"{layer}.{name}", target, part=part, split=split))
    for rule in mlp:
        source, target = f"{layer}.{rule.source}", f"{ours}.{rule.target}"
        rules.append(dataclasses.replace(rule, source=source, target=target))
    return tuple(
        dataclasses.replace(rule, source=f"{prefix}{rule.source}")
        for prefix in prefixes
        for rule in rules
    )


class RotaryBert(PostNormEncoder, ABC):
    """Families say how sizes are called and what the feed-forward layer is."""

    ignored_weights: ClassVar[Mapping[str, str]] = UNUSED_HEADS
    base_name: ClassVar[str]
    """The checkpoint's name of the encoder within a model with a head."""
    theta: ClassVar[float]
    """Base of the rotation, unless the config has another."""
    num_segments: ClassVar[int]
    """Rows of the segment table, unless the config says otherwise."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        super().__init__(context, prefix or f"{self.base_name}.")

    def eps(self) -> float:
        return self.settings.number("layer_norm_eps", 1e-12)

    def num_heads(self) -> int:
        return self.settings.integer("num_attention_heads")

    def head_dim(self) -> int:
        return self.settings.head_dim()

    def attention_bias(self) -> bool:
        return True

    def make_embeddings(self, context: BuildContext, prefix: str) -> SegmentEmbeddings:
        below = f"{prefix}embeddings"
        return SegmentEmbeddings(
            context,
            (f"{below}.word_embeddings", f"{below}.token_type_embeddings", f"{below}.LayerNorm"),
            vocab_size=self.settings.integer("vocab_size"),
            size=self.hidden_size(),
            num_segments=self.settings.integer("type_vocab_size", self.num_segments, minimum=0),
            eps=self.eps(),
        )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        rope = rope_settings(context.config, theta=self.theta)
        limit = self.settings.integer("max_position_embeddings", 8192)
        self.rotary = rotary_table(context, rope, self.head_dim(), max_positions=limit)

    def make_block(self, context: BuildContext, index: int, prefix: str) -> EncoderBlock:
        name, size = f"{prefix}layers.{index}", self.hidden_size()
        return PostNormBlock(
            self.make_attention(context, f"{name}.self_attn"),
            LayerNorm(context, f"{name}.post_attention_layernorm", size, self.eps()),
            self.make_mlp(context, index, f"{name}.mlp"),
            LayerNorm(context, f"{name}.post_mlp_layernorm", size, self.eps()),
        )

    def make_attention(self, context: BuildContext, name: str) -> EncoderAttention:
        heads, bias = self.num_heads(), self.attention_bias()
        return EncoderAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=self.head_dim(),
            rotary=self.rotary,
            qkv_bias=bias,
            out_bias=bias,
        )

    @abstractmethod
    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        """The feed-forward layer of a block; ``name`` as the checkpoint spells it."""
