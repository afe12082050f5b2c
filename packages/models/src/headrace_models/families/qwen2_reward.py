"""Reward models made of Qwen2: Qwen2.5-Math-RM and Qwen2.5-Math-PRM.

Yang et al. 2024, arXiv:2409.12122; Zhang et al. 2025, arXiv:2501.07301.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.convert import OUT, PoolingDecoder, pooling_rules
from headrace_models.families.qwen2 import Qwen2ForCausalLM
from headrace_models.pooling.classifier import Classifier, HeadLinear

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


class Qwen2ForRewardModel(PoolingDecoder, Qwen2ForCausalLM):
    """Two layers with a ReLU between them; how many labels is the architecture's affair."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *pooling_rules(Qwen2ForCausalLM),
        WeightRule("score.0", OUT.replace("out", "dense")),
        WeightRule("score.2", OUT),
    )

    def make_classifier(self, context: BuildContext, prefix: str) -> Classifier:
        assert context.pooling is not None
        size, labels = self.hidden_size(), context.pooling.num_labels
        return Classifier(
            HeadLinear(context, f"{prefix}score.2", size, labels),
            HeadLinear(context, f"{prefix}score.0", size, size),
            torch.relu,
        )
