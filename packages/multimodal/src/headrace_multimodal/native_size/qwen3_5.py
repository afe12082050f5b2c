"""Images and videos of Qwen3.5: Qwen3-VL's, each token of which takes one vector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_multimodal.video.qwen_vl import Qwen3VLVideos


class Qwen3_5Videos(Qwen3VLVideos):
    """See the module."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self.embeds_width = 1
