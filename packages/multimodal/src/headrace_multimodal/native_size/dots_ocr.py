"""Images of dots.ocr: Qwen2-VL's, in patches of one frame."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_multimodal.images.processor import part
from headrace_multimodal.images.qwen_vl import QwenVLProcessor


class DotsOCRProcessor(QwenVLProcessor):
    """See the module."""

    text = "<|img|><|imgpad|><|endofimg|>"

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        vision = {"temporal_patch_size": 1, **part(config, "vision_config")}
        super().__init__({**config, "vision_config": vision}, path)
