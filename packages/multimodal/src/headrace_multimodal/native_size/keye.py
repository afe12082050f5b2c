"""Images of Keye-VL and Keye-VL 1.5: Qwen2-VL's, in patches of one frame; an image that is narrower than a
token is made as wide as one first.

Kwai Keye Team 2025, arXiv:2507.01949.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_multimodal.images.processor import part
from headrace_multimodal.images.qwen_vl import QwenVLProcessor, smart_size


class KeyeProcessor(QwenVLProcessor):
    """See the module."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        vision = {"temporal_patch_size": 1, **part(config, "vision_config")}
        super().__init__({**config, "vision_config": vision}, path)
        if not {"min_pixels", "size"} & set(self.stated):
            raise UnsupportedModel(
                "image processor: min_pixels and max_pixels, or size, must be stated: Keye-VL's code has had "
                "several defaults"
            )

    def image_size(self, size: tuple[int, ...], limits: tuple[int, int]) -> tuple[int, int]:
        height, width = size
        factor = self._patch * self._merge
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return smart_size(height, width, factor, *limits, given=(size[0], size[1]))
