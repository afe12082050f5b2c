"""Videos of models that see them at their own size, beside the checkpoints' own library; see
``test_video_processors.py``."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_video_processors as videos
from test_video_processors import Library, clip, video

from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for


class Glm(videos.Qwen):
    """Frames stand in front of their times, as images."""

    names = (
        "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
        "<|end_of_video|>",
    )  # fmt: skip
    text = "the FILM water\nFILMruns".replace("FILM", "<|begin_of_video|><|video|><|end_of_video|>")
    settings: ClassVar = {"size": {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 30}}
    shapes = ((4, 61, 37), (5, 20, 64), (8, 300, 90))
    module: ClassVar[str]
    name: ClassVar[str]
    slack = 100

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.glm4v.video_processing_glm4v import smart_resize

        size = self.settings["size"]
        found: tuple[int, int] = smart_resize(
            count, height, width, 2, 28, size["shortest_edge"], size["longest_edge"]
        )
        return found

    def hf_processor(self, tokenizer: Any, taken: Sequence[MediaItem]) -> Any:
        module = f"transformers.models.{self.module}.processing_{self.module}"
        kind: Any = getattr(importlib.import_module(module), f"{self.name}Processor")
        made = kind.__new__(kind)
        made.video_processor, made.video_token = Library(self, taken), "<|video|>"
        made.image_token = "<|image|>"
        return made

    @property
    def vector_token(self) -> int:
        return self.ids[self.names[0]]


class TestGlm4v(Glm):
    architecture = "Glm4vForConditionalGeneration"
    module, name = "glm4v", "Glm4v"

    @pytest.mark.parametrize(
        ("file", "settings"),
        [
            ("processor_config.json", {"processor_class": "Glm46VProcessor"}),
            ("video_preprocessor_config.json", {"processor_class": "Glm46VProcessor"}),
        ],
    )
    def test_a_checkpoint_that_names_its_processor(
        self, folder: Path, file: str, settings: dict[str, str]
    ) -> None:
        """GLM-4.6V's weights are of GLM-4.5V's class."""
        item = video(clip(4, 60, 60), fps=8.0)
        plain, named = self.processor(folder), None
        (folder / file).write_text(json.dumps({**self.settings, **settings}))
        named = processor_for(self.architecture, self.config, folder)
        (whole,), (tenths,) = plain.process([item], {}), named.process([item], {})
        assert tenths.num_tokens > whole.num_tokens


class TestTarsier2(videos.TestQwen2VL):
    """Tokens are those of the tokenizer: the config names none."""

    architecture = "Tarsier2ForConditionalGeneration"

    @property
    def config(self) -> dict[str, Any]:
        return {"vision_config": self.vision}

    def test_without_a_token_of_videos_images_alone_are_taken(self, folder: Path) -> None:
        assert self.processor(folder).modalities() == ("image", "video")


class TestQwen3_5(videos.TestQwen3VL):
    architecture = "Qwen3_5ForConditionalGeneration"

    def test_a_token_takes_one_vector(self, folder: Path) -> None:
        """Qwen3-VL's takes those of the decoder's first layers, too."""
        assert self.processor(folder).embeds_width == 1


class TestGlm46V(Glm):
    architecture = "Glm46VForConditionalGeneration"
    module, name = "glm46v", "Glm46V"
