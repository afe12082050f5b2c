"""Processors of models that see images at their own size, beside those of the checkpoints' own library:
numbers, tokens of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_image_processors import ProcessorConformance, item, picture

from headrace_core.errors import RequestError
from headrace_multimodal import processor_for


class NativeSize(ProcessorConformance):
    config: ClassVar = {"image_token_id": 4, "video_token_id": 5, "vision_config": {}}
    inputs = ("pixel_values", "image_grid_thw")

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        found: torch.Tensor = made[name]
        return (found[0] if name == "image_grid_thw" else found).numpy()

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return int(made["image_grid_thw"].prod()) // 4


class TestGlm4v(NativeSize):
    """An image counts as two frames."""

    architecture = "Glm4vForConditionalGeneration"
    settings = (
        {},
        {"size": {"shortest_edge": 28 * 28 * 2 * 40, "longest_edge": 28 * 28 * 2 * 60}},
        {"patch_size": 16, "size": {"shortest_edge": 2048, "longest_edge": 32 * 32 * 40}},
    )

    def library(self, **settings: Any) -> Any:
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        return Glm4vImageProcessorPil(**settings)

    @pytest.mark.parametrize("name", ["Glm4v", "Glm4vMoe", "Glm46V", "GlmOcr"])
    def test_size(self, name: str, tmp_path: Path) -> None:
        """An option within the checkpoint's own limits, as the library takes it."""
        self.library().save_pretrained(tmp_path)
        own = processor_for(f"{name}ForConditionalGeneration", self.config, tmp_path)
        image, size = picture(300, 211), {"shortest_edge": 2000, "longest_edge": 28 * 28 * 2 * 9}
        (made,) = own.process([item(image)], {"size": size})
        theirs = self.library(size=size)(images=image, return_tensors="pt")
        assert made.num_tokens == self.num_tokens(theirs)
        (plain,), (more,) = (
            own.process([item(image)], options)
            for options in ({}, {"size": {"shortest_edge": 12544, "longest_edge": 1 << 40}})
        )
        assert more.num_tokens == plain.num_tokens
        for wrong in (9, None, {"longest_edge": 9}, {"shortest_edge": "9", "longest_edge": 9}):
            with pytest.raises(RequestError, match=r"mm_processor_kwargs\.size"):
                own.process([item(image)], {"size": wrong})

    def test_modalities(self, tmp_path: Path) -> None:
        for name, taken in (("Glm4v", ("image", "video")), ("GlmOcr", ("image",))):
            own = processor_for(f"{name}ForConditionalGeneration", self.config, tmp_path)
            assert own.modalities() == taken
