"""Qwen3-VL's image processor beside that of the checkpoints' own library: numbers, tokens of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_image_processors import ProcessorConformance, item, picture
from test_image_processors_pixtral import tokenizer

from headrace_multimodal import processor_for

SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


class TestQwen3VL(ProcessorConformance):
    architecture = "Qwen3VLForConditionalGeneration"
    config: ClassVar = {"image_token_id": 4, "vision_config": {"patch_size": 14}}
    settings = (
        {
            "patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        },
        {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 32 * 32 * 20}},
    )  # fmt: skip
    inputs = ("pixel_values", "image_grid_thw")

    def library(self, **settings: Any) -> Any:
        from transformers import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        found: torch.Tensor = made[name]
        return (found[0] if name == "image_grid_thw" else found).numpy()

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return int(made["image_grid_thw"].prod()) // 4

    @pytest.mark.parametrize("name", ["Qwen3VL", "Qwen3VLMoe", "Qwen3_5"])
    def test_prompt(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

        # Its check of classes looks for one of videos, which needs torchvision.
        monkeypatch.setattr(
            Qwen3VLProcessor, "check_argument_for_proper_class", lambda *given: None
        )
        text = "a <|vision_start|> <|image_pad|> <|vision_end|> b <|image_pad|> c"
        images = [picture(90, 61), picture(60, 310)]
        library = self.library(**self.settings[1])
        library.save_pretrained(tmp_path)
        own = processor_for(f"{name}ForConditionalGeneration", self.config, tmp_path)
        media = own.process([item(image) for image in images], {})
        theirs = Qwen3VLProcessor(library, tokenizer(SPECIAL))
        found = theirs(images=images, text=text, return_tensors=None)["input_ids"][0]
        ids = tokenizer(SPECIAL)(text)["input_ids"]
        assert own.place(ids, media).token_ids == list(found)
        assert found.count(4) == sum(one.num_tokens for one in media)
