"""MiniMax-VL-01's images: LLaVA-NeXT's tiles, in sizes that are rounded down.

MiniMax 2025, arXiv:2501.08313.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.anyres import AnyresProcessor, Size, best_canvas, exact
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels

_IMAGE_TOKEN = 200_025
"""Of configs that leave it out."""
_SIDES = range(336, 2017, 336)


class MiniMaxVL01Processor(AnyresProcessor):
    """``pixel_values`` are [1 + tiles, 3, height, width]."""

    canvases: ClassVar[Sequence[Size]] = tuple(
        size for size in itertools.product(_SIDES, _SIDES) if size[0] * size[1] <= 2016 * 1008
    )

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__({"image_token_index": _IMAGE_TOKEN, **config}, path)
        mode = self.stated.get("process_image_mode", "anyres")
        if mode != "anyres":
            raise UnsupportedModel(
                f"image processor: process_image_mode = {mode!r}: must be anyres"
            )

    def tile_shape(self) -> OneSize:
        side = {"height": self.tile, "width": self.tile}
        return OneSize({"size": side, "do_center_crop": False, **self.stated}, self.tile)

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        """Raises: RequestError: nothing of the image would be left on its canvas."""
        height, width = pixels.shape[:2]
        if not all(self.fitting((height, width), best_canvas((height, width), self.sizes))):
            raise RequestError(
                f"image of {width} x {height} pixels: is too narrow for this model",
                param="multi_modal_data",
            )
        return super().one(pixels, options)

    @staticmethod
    def scaled(length: int, new: int, old: int) -> int:
        return exact(length, new, old)

    def fitting(self, image: Size, canvas: Size) -> Size:
        height, width = image
        if width / height > canvas[1] / canvas[0]:
            return int(canvas[1] * height / width), canvas[1]
        return canvas[0], int(canvas[0] * width / height)
