"""Reward models made of Qwen2: Qwen2.5-Math-RM and Qwen2.5-Math-PRM.

Yang et al. 2024, arXiv:2409.12122; Zhang et al. 2025, arXiv:2501.07301.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.convert import OUT, PoolingDecoder, pooling_rules
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.decoders.windows import upper_layer_window
from headrace_models.pooling.classifier import Classifier, HeadLinear

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Qwen2ForRewardModel(PoolingDecoder, LlamaDecoder):
    """Qwen 2's blocks (:class:`~headrace_models.layers.blocks.PreNormBlock`), then two layers with a ReLU
    between them. The architecture decides how many labels there are."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *pooling_rules(LlamaDecoder),
        WeightRule("score.0", OUT.replace("out", "dense")),
        WeightRule("score.2", OUT),
    )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        window = upper_layer_window(self.settings, index)
        return self.attention(context, name, sliding_window=window, qkv_bias=True)

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier:
        assert context.pooling is not None
        size, labels = self.hidden_size(), context.pooling.num_labels
        return Classifier(
            HeadLinear(context, f"{prefix}score.2", size, labels),
            HeadLinear(context, f"{prefix}score.0", size, size),
            torch.relu,
        )
