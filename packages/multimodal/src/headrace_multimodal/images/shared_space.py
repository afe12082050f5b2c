"""Images of models that compare them with texts: one image, and no text, is a prompt.

Radford et al. 2021, arXiv:2103.00020; Zhai et al. 2023, arXiv:2303.15343.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.clip import OneSize
from headrace_multimodal.images.pixels import Pixels
from headrace_multimodal.images.processor import PIXEL_VALUES, ImageProcessor, packed, part
from headrace_multimodal.images.words import Words

_PLACEHOLDER = 0


class ClipProcessor(ImageProcessor):
    """An image of one size takes the place of a text."""

    text = ""
    siglip: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        side = part(config, "vision_config").get("image_size", 224)
        self._shape = OneSize(self.stated, side, siglip=self.siglip)
        self._words = Words(path)

    def find_placeholder(self) -> int:
        """Any token: its vector is not used."""
        return _PLACEHOLDER

    def one(self, pixels: Pixels, options: Mapping[str, Any]) -> ProcessedMedia:
        return ProcessedMedia({PIXEL_VALUES: packed(self._shape(pixels))}, 1)

    def largest_size(self) -> tuple[int, int]:
        return self._shape.size

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """
        Raises:
            RequestError: there is text beside the image, or a second image.
        """
        if len(media) != 1:
            raise RequestError(
                f"multi_modal_data: {len(media)} images: this model embeds one image, or a text",
                param="multi_modal_data",
            )
        if not self._words.special.issuperset(token_ids):
            raise RequestError(
                "prompt: must be empty beside an image, and in a conversation no text may stand beside it: "
                "this model embeds either a text or an image",
                param="prompt",
            )
        return MediaPlacement([self.placeholder_id], [0])


class SiglipProcessor(ClipProcessor):
    """SigLIP's: other numbers where a checkpoint says none."""

    siglip: ClassVar[bool] = True
