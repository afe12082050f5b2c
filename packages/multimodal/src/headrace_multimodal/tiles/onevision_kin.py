"""Images of R-4B and Bee-8B: LLaVA-OneVision's.

Yang et al. 2025, arXiv:2508.21113; Zhang et al. 2025, arXiv:2510.13795.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_multimodal.images.anyres import OnevisionProcessor

_KNOWN = ("LlavaOnevisionImageProcessor", "LlavaOnevisionImageProcessorFast")


class NormedOnevisionProcessor(OnevisionProcessor):
    """The same, also where no image is made smaller."""

    unbounded: ClassVar[str | None] = "anyres"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        kind = self.stated.get("image_processor_type", _KNOWN[0])
        if kind not in _KNOWN:
            raise UnsupportedModel(
                f"image processor: image_processor_type = {kind!r}: must be {_KNOWN[0]}; it is not known "
                "what others make of an image"
            )
