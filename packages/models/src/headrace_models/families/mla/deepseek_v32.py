"""DeepSeek V3.2: V3's layers, whose queries attend to the ``index_topk`` tokens that an indexer picks out
of the context.

DeepSeek-AI 2025, arXiv:2512.02556. Where ``max_model_len`` is no more than that the indexer would pick all
tokens: V3's attention is the model's then, and the indexer is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.token_indexer import (
    IGNORED_INDEXER,
    SparseMLAAttention,
    TokenIndexer,
    indexer_rules,
    indexer_sizes,
)
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import (
    MLA_MOE_RULES,
    MLADecoder,
    grouped_routing,
    is_dense_by_frequency,
)
from headrace_models.layers.decoders.moe import is_dense_by_list
from headrace_models.layers.mlp import MLPLayer
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention


class DeepseekV32ForCausalLM(MLADecoder):
    """DeepSeek V3.2 and V3.2-Exp."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MLA_MOE_RULES,
        *indexer_rules("model.layers.{}.self_attn.indexer", "layers.{}.attention.indexer"),
    )

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.indexer = indexer_sizes(self.settings)

    def picks_all(self) -> bool:
        """True if no context is longer than what the indexer picks."""
        return self.context.max_model_len <= self.indexer.top_k

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        ignored = further_layers(self.settings, self.num_layers())
        return {**ignored, **IGNORED_INDEXER} if self.picks_all() else ignored

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        if self.picks_all():
            return super().make_attention(context, index, name)
        return self.mla_attention(
            context,
            name,
            kind=SparseMLAAttention,
            indexer=self.make_indexer(context, f"{name}.indexer"),
        )

    def make_indexer(self, context: BuildContext, name: str) -> TokenIndexer:
        assert self.rotary is not None, "DeepSeek's configs always rotate"
        return TokenIndexer(
            context,
            name,
            self.indexer,
            hidden_size=self.hidden_size(),
            query_rank=self.settings.integer("q_lora_rank"),
            rotary=self.rotary,
            interleaved=self.settings.flag("indexer_rope_interleave", False),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if self.is_dense(index):
            return super().make_mlp(context, index, name)
        return self.make_mixture(context, name, grouped_routing(self.settings), corrected=True)

    def is_dense(self, index: int) -> bool:
        """By transformers' list, or as V3's configs say."""
        if self.settings.config.get("mlp_layer_types") is None:
            return is_dense_by_frequency(self.settings, index)
        return is_dense_by_list(self.settings, index, 0)
