"""The processor of LLaVA's class, by the tower in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_multimodal.images.clip import LlavaProcessor
from headrace_multimodal.images.pixtral import PixtralProcessor
from headrace_multimodal.images.processor import ImageProcessor, part


def llava_processor(config: Mapping[str, Any], path: Path) -> ImageProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`; arguments as :class:`ImageProcessor`'s."""
    pixtral = part(config, "vision_config").get("model_type") == "pixtral"
    return (PixtralProcessor if pixtral else LlavaProcessor)(config, path)
