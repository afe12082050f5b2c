"""Images of ERNIE 4.5 VL: Qwen2-VL's, in patches of one frame.

Baidu 2025, ERNIE 4.5 technical report, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.multimodal import MediaPlacement, ProcessedMedia
from headrace_multimodal.images.processor import part, token_id
from headrace_multimodal.images.qwen_vl import QwenVLProcessor
from headrace_multimodal.images.words import Words

_WRITTEN = "<|image@placeholder|>"


class Ernie4_5VLProcessor(QwenVLProcessor):
    """See the module. Prompts have a placeholder that need be no token, or the token of a vector."""

    text = f"<|IMAGE_START|>{_WRITTEN}<|IMAGE_END|>"
    image_bounds = (56 * 56, 28 * 28 * 6177)

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        vision = {**part(config, "vision_config"), "temporal_patch_size": 1}
        super().__init__({**config, "vision_config": vision}, path)
        self._frames = 1
        self._words = Words(path)

    def find_placeholder(self) -> int:
        return token_id(self.config, "image_token_id", "im_patch_id")

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        if media and self.placeholder_id not in token_ids:
            token_ids = self._words.replaced(token_ids, _WRITTEN, self.placeholder_id)
        return super().place(token_ids, media)
