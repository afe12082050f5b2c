"""ERNIE 4.5 VL without its eyes: the text experts of its mixtures, which have others for images.

Baidu 2025, ERNIE 4.5 technical report, section 2.2: tokens of text and of images go to experts of their
own kind only; shared experts take both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.ernie_moe import (
    ERNIE_MOE_RULES,
    IGNORED_WEIGHTS,
    corrected_router,
    ernie_routing,
    is_dense_by_interval,
    num_shared_experts,
)
from headrace_models.layers.decoders.moe import MoEDecoder, is_dense_by_list
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_BY_KIND = (
    "moe_num_experts",
    "moe_intermediate_size",
    "moe_layer_start_index",
    "moe_layer_end_index",
)
"""Settings that configs may give as a list: for text, then for images."""
_OF_IMAGES = re.compile(r"\.mlp\.(vision_moe\.|gate\.weight_1$)")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


class Ernie4_5_VLMoeForCausalLM(MoEDecoder):
    """ERNIE-4.5-VL-28B-A3B, 424B-A47B, on text."""

    weight_rules: ClassVar[Sequence[WeightRule]] = ERNIE_MOE_RULES
    ignored_weights: ClassVar[Mapping[str, str]] = IGNORED_WEIGHTS
    ties_embeddings: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        config = {name: _of_text(name, value) for name, value in context.config.items()}
        super().__init__(replace(context, config=config), prefix)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("use_bias", False)
        super().prepare(context, prefix)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, interleaved=True)

    def is_dense(self, index: int) -> bool:
        if self.settings.config.get("mlp_layer_types") is not None:
            return is_dense_by_list(self.settings, index, 1)
        return is_dense_by_interval(self.settings, index)

    def routing(self, index: int) -> Routing:
        return ernie_routing(self.settings)

    def shared_size(self, index: int) -> int:
        return self.expert_size(index) * num_shared_experts(self.settings)

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        corrected = corrected_router(self.settings)
        return super().make_mixture(context, index, name, **corrected, **differences)

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The tensors that text needs, as ERNIE 4.5's mixtures of text have them. Published files number the
        experts of images after those of text and hold routers as [H, E]; transformers' modules keep
        the kinds apart."""
        count = self.settings.integer("moe_num_experts")
        for name, tensor, file in tensors:
            expert = _EXPERT.search(name)
            if _OF_IMAGES.search(name) or (expert is not None and int(expert[1]) >= count):
                continue
            if ".mlp.text_moe." in name:
                name = name.replace(".mlp.text_moe.", ".mlp.")
            elif name.endswith(".mlp.gate.weight"):
                tensor = tensor.t().contiguous()
            elif name.endswith(".mlp.moe_statics.e_score_correction_bias"):
                tensor = tensor[:1].contiguous()
            yield name, tensor, file


def _of_text(name: str, value: Any) -> Any:
    """The value for text of a setting that may be a list by kind."""
    return value[0] if name in _BY_KIND and isinstance(value, list) and value else value
