"""Images of one size, as CLIP's and SigLIP's processors make them; and LLaVA's placeholders for them.

Radford et al. 2021, arXiv:2103.00020; Liu et al. 2023, arXiv:2310.03744.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import (
    PIXEL_VALUES,
    ImageProcessor,
    packed,
    part,
)
from headrace_multimodal.images.steps import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALVES,
    Float,
    Numbers,
    centre,
    resized,
    two_sizes,
)


class OneSize:
    """Resize, cut out the middle, normalise: an image of a fixed size.

    Args:
        stated: the processor's settings.
        default: side of the image where they say none.
        siglip: settings that are left out are SigLIP's, not CLIP's.
    """

    def __init__(self, stated: Mapping[str, Any], default: int, *, siglip: bool = False) -> None:
        plain = {"height": default, "width": default}
        size = stated.get("size", plain if siglip else {"shortest_edge": default})
        self._resize = bool(stated.get("do_resize", True))
        self._resample = int(stated.get("resample", BICUBIC))
        self._edge: int | None = None
        self._size = (default, default)
        if isinstance(size, int):
            size = {"shortest_edge": size}
        if isinstance(size, Mapping) and size.get("shortest_edge"):
            self._edge = int(size["shortest_edge"])
        else:
            self._size = two_sizes(size, "size")
        self._crop: tuple[int, int] | None = None
        if stated.get("do_center_crop", not siglip):
            self._crop = two_sizes(stated.get("crop_size", plain), "crop_size")
        elif self._edge is not None:
            raise UnsupportedModel(
                f"image processor: size = {size!r} without do_center_crop: images must be of one size"
            )
        mean, std = (HALVES, HALVES) if siglip else (CLIP_MEAN, CLIP_STD)
        self._numbers = Numbers.of(stated, mean, std)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of what it makes."""
        return self._crop or self._size

    def __call__(self, pixels: Pixels) -> Float:
        """[height, width, 3] -> [3, *size]."""
        if self._resize:
            pixels = resized(pixels, *self._target(pixels), self._resample)
        if self._crop is not None:
            pixels = centre(pixels, *self._crop)
        return self._numbers(pixels)

    def _target(self, pixels: Pixels) -> tuple[int, int]:
        if self._edge is None:
            return self._size
        height, width = pixels.shape[:2]
        if height <= width:
            return self._edge, int(self._edge * width / height)
        return int(self._edge * height / width), self._edge


class LlavaProcessor(ImageProcessor):
    """A placeholder for each patch of an image of one size."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        vision = part(config, "vision_config")
        self._patch = vision.get("patch_size", 14)
        if type(self._patch) is not int or self._patch < 1:
            raise UnsupportedModel(
                f"config.json: vision_config.patch_size = {self._patch!r}: must be a size"
            )
        siglip = str(vision.get("model_type", "")).startswith("siglip")
        self._shape = OneSize(self.stated, vision.get("image_size", 336), siglip=siglip)
        strategy = config.get("vision_feature_select_strategy", "default")
        has_class = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        height, width = self._shape.size
        self._num_tokens = (height // self._patch) * (width // self._patch)
        self._num_tokens += int(has_class) - int(strategy == "default")

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        return ProcessedMedia({PIXEL_VALUES: packed(self._shape(pixels))}, self._num_tokens)

    def sizeless(self, num_vectors: int) -> ProcessedMedia:
        """Any: all have as many vectors."""
        return self.blank(*self.largest_size())

    def largest_size(self) -> tuple[int, int]:
        return self._shape.size

    def options(self) -> Sequence[str]:
        return ()
