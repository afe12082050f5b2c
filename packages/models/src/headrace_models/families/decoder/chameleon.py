"""The language model of Chameleon: Llama with norms of each head, whose answers are text only.

Chameleon Team 2024, arXiv:2405.09818. The norms of 34B stand behind both halves of a block (``swin_norm``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.heads_norm import HeadLayerNorm
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Slot
from headrace_models.layers.blocks import PostNormBlock, PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.pieces import image_tokens
from headrace_models.layers.decoders.unheard_tokens import ShortHead
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.vocabulary import vocab_shard
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-5


class ChameleonTextForCausalLM(LlamaDecoder):
    """Chameleon 7B and 34B; an image's tokens are tokens of the vocabulary."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *RULES,
        *HEAD_NORM_RULES,
        WeightRule("model.layers.{}.input_layernorm", "layers.{}.attention_out_norm"),
        WeightRule("model.layers.{}.post_attention_layernorm", "layers.{}.mlp_out_norm"),
    )
    default_eps: ClassVar[float] = 1e-5

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        attention = self.make_attention(context, index, f"{name}.self_attn")
        mlp = self.make_mlp(context, index, f"{name}.mlp")
        names = ("input_layernorm", "post_attention_layernorm")
        norms = [self.make_norm(context, f"{name}.{norm}") for norm in names]
        if self.settings.flag("swin_norm", False):
            return PostNormBlock(context.ops, attention, norms[0], mlp, norms[1])
        return PreNormBlock(norms[0], attention, norms[1], mlp)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        heads, size = self.settings.integer("num_attention_heads"), self.head_dim()
        kv_heads = self.settings.num_kv_heads()
        return self.attention(
            context,
            name,
            qkv_bias=bias,
            out_bias=bias,
            query_norm=_BiasedHeadNorm(context, f"{name}.q_norm", heads, size, _EPS),
            key_norm=_BiasedHeadNorm(context, f"{name}.k_norm", kv_heads, size, _EPS),
        )

    def is_tied(self) -> bool:
        return False

    def make_embedding(self, context: BuildContext, prefix: str) -> Embedding:
        name = f"{prefix}{self.embedding_name}"
        vocab = self.settings.integer("vocab_size")
        shard = vocab_shard(vocab, context.communicator)
        return Embedding(context, name, vocab, self.hidden_size(), shard=shard)

    def make_head(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("tie_word_embeddings", False)
        number = self.settings.integer("vocab_size")
        silent = list(image_tokens(self.settings.config.get("vocabulary_map"), number).values())
        name = f"{prefix}{self.head_name}"
        self.head = ShortHead(context, name, (number, number), self.hidden_size(), silent)


class _BiasedHeadNorm(HeadLayerNorm):
    """Weight and bias [heads, D]."""

    def slots(self) -> Mapping[str, Slot]:
        shape = (self.part.size, self.head_dim)
        return {**super().slots(), "bias": Slot(shape, parts=(self.part,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        self.bias = tensors["bias"].contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, D] -> the same shape."""
        normed = super().__call__(x).flatten(1)
        return self.ops.add(normed, self.bias.as_strided(normed.shape, (0, 1))).view(x.shape)
