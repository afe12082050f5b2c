"""Chameleon's image processor beside that of its library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_image_processors import ProcessorConformance, array, item, picture

from headrace_core.errors import UnsupportedModel
from headrace_multimodal import processor_for

TOKENS = {"<racm3:break>": 30, "<eoss>": 31, "<reserved08706>": 32}


class TestChameleon(ProcessorConformance):
    architecture = "ChameleonForConditionalGeneration"
    config: ClassVar = {
        "vocabulary_map": {"<image>": 40},
        "vq_config": {"resolution": 48, "channel_multiplier": [1, 1, 2, 2]},
    }
    settings: ClassVar = ({}, {"rescale_factor": 0.01, "image_mean": [0.5] * 3, "resample": 3})

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        add_files(tmp_path, 36)
        return tmp_path

    def library(self, **settings: Any) -> Any:
        from transformers.models.chameleon.image_processing_pil_chameleon import (
            ChameleonImageProcessorPil,
        )

        class InFolder(ChameleonImageProcessorPil):
            def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
                Path(folder).mkdir(exist_ok=True)
                add_files(Path(folder), 36)
                return super().save_pretrained(folder, **kwargs)

        sizes = {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}}
        return InFolder(**{**sizes, **settings})

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return 38

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """Images of 512."""
        add_files(tmp_path, 1024)
        config = {"vocabulary_map": {"<image>": 40}}
        (own,) = processor_for(self.architecture, config, tmp_path).process(
            [item(picture(70, 40))], {}
        )
        made = type(self.library()).__mro__[1]()(images=picture(70, 40), return_tensors="pt")
        assert abs(array(own, "pixel_values") - made["pixel_values"][0].numpy()).max() < 1e-5

    def test_prompts(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(picture(30, 40)), item(picture(60, 40))], {})
        image = [30, *[40] * 36, 31]
        placed = processor.place([5, 40, 6, 40], media)
        assert placed.token_ids == [5, *image, 6, *image, 32]
        assert processor.place([40, 40, 32], media).token_ids == [*image, *image, 32]
        assert media[0].runs == ((1, 36),)

    def test_refused(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        for config, named in (
            ({**self.config, "vq_config": {"resolution": 64}}, "takes images of 64"),
            ({**self.config, "vocabulary_map": {}}, "<image> must be a token id"),
        ):
            with pytest.raises(UnsupportedModel, match=named):
                processor_for(self.architecture, config, tmp_path)
        add_files(tmp_path, 40)
        with pytest.raises(UnsupportedModel, match="image_seq_length = 40"):
            processor_for(self.architecture, self.config, tmp_path)


def add_files(folder: Path, number: int) -> None:
    tokens = {str(number): {"content": token} for token, number in TOKENS.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": number}))
