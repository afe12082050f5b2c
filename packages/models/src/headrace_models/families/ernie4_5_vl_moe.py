"""ERNIE 4.5 VL without its eyes: the text experts of its mixtures, which have others for images.

Baidu 2025, ERNIE 4.5 technical report, section 2.2: tokens of text and of images go to experts of their
own kind only; shared experts take both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_models.families.ernie4_5_moe import Ernie4_5_MoeForCausalLM
from headrace_models.families.moe_shape import is_dense_by_list

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


class Ernie4_5_VLMoeForCausalLM(Ernie4_5_MoeForCausalLM):
    """ERNIE-4.5-VL-28B-A3B, 424B-A47B, on text."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        config = {name: _of_text(name, value) for name, value in context.config.items()}
        super().__init__(replace(context, config=config), prefix)

    def is_dense(self, index: int) -> bool:
        if self.settings.config.get("mlp_layer_types") is not None:
            return is_dense_by_list(self.settings, index, 1)
        return super().is_dense(index)

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The tensors that text needs, as ERNIE 4.5's own class has them. Published files number the
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
