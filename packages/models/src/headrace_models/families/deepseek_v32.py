"""DeepSeek V3.2: V3, of whose context a query attends to the ``index_topk`` tokens that an indexer picks.

DeepSeek-AI 2025, arXiv:2512.02556. Where ``max_model_len`` is no more than that the indexer would pick all
tokens: V3's attention is the model's then, and the indexer is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import WeightRule
from headrace_models.families.deepseek_v3 import DeepseekV3ForCausalLM
from headrace_models.families.moe_shape import is_dense_by_list
from headrace_models.layers.token_indexer import (
    IndexerSizes,
    PickedAttention,
    Picks,
    TokenIndexer,
    indexer_rules,
)
from headrace_models.settings import MAX_HEAD_DIM

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention import SelfAttention

INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\..*"


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek V3.2 and V3.2-Exp."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *DeepseekV3ForCausalLM.weight_rules,
        *indexer_rules("model.layers.{}.self_attn.indexer", "layers.{}.attention.indexer"),
    )
    interleaves_indexer: ClassVar[bool] = False
    """Whether the indexer rotates neighbours, not halves, if the config does not say."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.indexer = IndexerSizes(
            num_heads=self.settings.integer("index_n_heads", 64),
            head_dim=self.settings.integer("index_head_dim", 128, maximum=MAX_HEAD_DIM),
            top_k=self.settings.integer("index_topk", 2048),
        )
        self.picks: Picks | None = None

    def picks_all(self) -> bool:
        """Whether no context is longer than what the indexer picks."""
        return self.context.max_model_len <= self.indexer.top_k

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        ignored = super().ignored_weights
        return (
            {**ignored, INDEXER: "picks tokens of longer contexts"} if self.picks_all() else ignored
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        if self.picks_all():
            return super().make_attention(context, index, name)
        return self.latent_attention(
            context,
            name,
            kind=PickedAttention,
            indexer=self.make_indexer(context, index, f"{name}.indexer"),
            picks=self.picks,
        )

    def make_indexer(self, context: BuildContext, index: int, name: str) -> TokenIndexer | None:
        """The layer's; None: it attends to what the layer before does."""
        assert self.rotary is not None, "DeepSeek's configs always rotate"
        return TokenIndexer(
            context,
            name,
            self.indexer,
            hidden_size=self.hidden_size(),
            query_rank=self.settings.integer("q_lora_rank"),
            rotary=self.rotary,
            interleaved=self.settings.flag("indexer_rope_interleave", self.interleaves_indexer),
        )

    def is_dense(self, index: int) -> bool:
        """By transformers' list, or as V3's configs say."""
        if self.settings.config.get("mlp_layer_types") is None:
            return super().is_dense(index)
        return is_dense_by_list(self.settings, index, 0)
