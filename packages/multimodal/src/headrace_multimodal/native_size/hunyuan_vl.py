"""Images of HunyuanOCR: Qwen2-VL's, in patches of one frame; a token for every four of them, one at the end
of each row, and one on either side.

Tencent 2025, HunyuanOCR, arXiv:2511.19575.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.multimodal import Modality, ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import part
from headrace_multimodal.images.qwen_vl import GRID, MAX_ASPECT, QwenVLProcessor
from headrace_multimodal.images.steps import BICUBIC

_AROUND = 2
_PLACE = "<\uff5chy_place\u2581holder\u2581no\u2581{}\uff5c>"
"""Tokens in front of an image, of it, and behind it, by their numbers."""


class HunYuanVLProcessor(QwenVLProcessor):
    """See the module."""

    text = "".join(map(_PLACE.format, (100, 102, 101)))
    image_bounds = (512 * 512, 2048 * 2048)

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        defaults = {"temporal_patch_size": 1, "patch_size": 16}
        vision = {**defaults, **part(config, "vision_config")}
        super().__init__({**config, "vision_config": vision}, path)
        self._resample = BICUBIC  # settings say another, which the published code passes over

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        return self._with_ends(super().one(pixels, options))

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        return self._with_ends(super().embedded(modality, num_vectors, facts))

    def _with_ends(self, item: ProcessedMedia) -> ProcessedMedia:
        _, height, _ = np.frombuffer(item.inputs[GRID].data, np.int64).tolist()
        return replace(item, num_tokens=item.num_tokens + height // self._merge + _AROUND)

    def largest_size(self) -> tuple[int, int]:
        """Of the images with most squares, the one with most rows."""
        unit = self._patch * self._merge
        most = max(1, self._most // unit**2)
        sizes = [
            (min(most // columns, MAX_ASPECT * columns), columns) for columns in range(1, most + 1)
        ]
        rows, columns = max(sizes, key=lambda size: size[0] * (size[1] + 1))
        return rows * unit, columns * unit
