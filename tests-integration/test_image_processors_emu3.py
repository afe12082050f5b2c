"""Emu3's image processor beside that of its library, and prompts beside its whole processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from speech_checkpoints import save_tokenizer, token_ids
from test_image_processors import ProcessorConformance, item, picture

from headrace_core.errors import UnsupportedModel
from headrace_multimodal import processor_for

MARKS = {
    "image_token": "<image>", "boi_token": "<|image start|>", "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>", "eoi_token": "<|image end|>", "bos_token": "<|extra_203|>",
}  # fmt: skip
SPECIAL = (*MARKS.values(), "<|extra_200|>")


def add_files(folder: Path) -> dict[str, int]:
    """Tokenizer and its config; the ids of special tokens."""
    ids = save_tokenizer(folder, SPECIAL)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **MARKS})
    )
    return ids


class TestEmu3(ProcessorConformance):
    architecture = "Emu3ForConditionalGeneration"
    config: ClassVar[dict[str, Any]] = {"vq_config": {"channel_multiplier": [1, 2, 2, 4]}}
    settings: ClassVar = (
        {"min_pixels": 1024, "max_pixels": 6400},
        {},
        {"min_pixels": 1024, "max_pixels": 90000, "image_mean": [0.5] * 3, "resample": 2},
    )

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        cls.config["vocabulary_map"] = {"<image>": add_files(tmp_path)["<image>"]}
        return tmp_path

    def library(self, **settings: Any) -> Any:
        from transformers.models.emu3.image_processing_emu3 import Emu3ImageProcessor

        class InFolder(Emu3ImageProcessor):
            def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
                Path(folder).mkdir(exist_ok=True)
                add_files(Path(folder))
                return super().save_pretrained(folder, **kwargs)

        return InFolder(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> Any:
        return np.asarray(made[name][0])

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        rows, columns = (side // 8 for side in made["image_sizes"][0])
        return int(rows * (columns + 1)) + 4 + len(f"{rows}*{columns}")

    @pytest.mark.parametrize("text", ["the <image>of", "<image> in<image>\nthe"])
    def test_prompts_are_the_librarys(self, text: str, tmp_path: Path) -> None:
        from transformers import PreTrainedTokenizerFast
        from transformers.models.emu3.processing_emu3 import Emu3Processor

        own = self.library(min_pixels=1024, max_pixels=9000)
        own.save_pretrained(tmp_path)
        extra = {k: v for k, v in MARKS.items() if k != "bos_token"}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token=MARKS["bos_token"],
            extra_special_tokens=extra,
        )  # fmt: skip
        images = [picture(60, 90), picture(130, 70)][: text.count("<image>")]
        made = Emu3Processor(own, tokenizer)(images=images, text=text)
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(image) for image in images], {})
        placed = processor.place(token_ids(tmp_path, text), media)
        assert placed.token_ids == made["input_ids"][0]
        taken = {
            offset + first + at
            for one, offset in zip(media, placed.offsets, strict=True)
            for first, number in one.runs
            for at in range(number)
        }
        mark = self.config["vocabulary_map"]["<image>"]
        assert taken == {at for at, token in enumerate(placed.token_ids) if token == mark}

    def test_text_alone_is_left(self, tmp_path: Path) -> None:
        tokens = token_ids(tmp_path, "the of")
        placed = processor_for(self.architecture, self.config, tmp_path).place(tokens, [])
        assert placed.token_ids == tokens

    @pytest.mark.parametrize(
        ("config", "settings", "named"),
        [
            ({"vq_config": {"channel_multiplier": [1, 2]}}, {}, r"channel_multiplier = \[1, 2\]"),
            ({"vocabulary_map": {}}, {}, "<image> must be a token id"),
            ({}, {"spatial_factor": 16}, "spatial_factor = 16"),
            ({}, {"do_resize": False}, "do_resize = False"),
            ({}, {"min_pixels": 900, "max_pixels": 800}, r"size = \[900, 800\]"),
        ],
    )
    def test_refused(
        self, config: dict[str, Any], settings: dict[str, Any], named: str, tmp_path: Path
    ) -> None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(self.architecture, {**self.config, **config}, tmp_path)
