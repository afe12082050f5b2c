"""DeepSeek V3.2: V3, of whose context a query attends to the ``index_topk`` tokens that an indexer picks.

DeepSeek-AI 2025, arXiv:2512.02556. In a context of no more tokens than that the indexer picks all, so
that V3's attention is the model's, and the indexer's weights are not read. Longer contexts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_models.families.deepseek_v3 import DeepseekV3ForCausalLM
from headrace_models.families.moe_shape import is_dense_by_list

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek V3.2 and V3.2-Exp, in contexts that need no indexer."""

    def prepare(self, context: BuildContext, prefix: str) -> None:
        picked = self.settings.integer("index_topk", 2048)
        if context.max_model_len > picked:
            raise UnsupportedModel(
                f"max_model_len = {context.max_model_len}: must be at most {picked}, the model's "
                "index_topk: attention to tokens that an indexer picks is not supported, and in "
                "contexts up to that it picks all"
            )
        super().prepare(context, prefix)

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        indexer = r"model\.layers\.\d+\.self_attn\.indexer\..*"
        return {**super().ignored_weights, indexer: "picks tokens in longer contexts"}

    def is_dense(self, index: int) -> bool:
        """By transformers' list, or as V3's configs say."""
        if self.settings.config.get("mlp_layer_types") is None:
            return super().is_dense(index)
        return is_dense_by_list(self.settings, index, 0)
