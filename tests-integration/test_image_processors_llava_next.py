"""Image processors of LLaVA-NeXT and LLaVA-OneVision beside the library's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from test_image_processors import ProcessorConformance, array, item, picture

from headrace_core.errors import UnsupportedModel
from headrace_multimodal import processor_for


class Anyres(ProcessorConformance):
    tile: ClassVar[int]
    inputs = ("pixel_values", "image_sizes")

    def counted(self, library: Any) -> Any:
        """The library's processor of prompts, for its count of tokens."""
        raise NotImplementedError

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        processor = self.counted(self.library())
        return len(processor.replace_image_token(made, 0)) // len(processor.image_token)

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        library = self.library()
        said: dict[str, Any] = {"size": {"height": self.tile, "width": self.tile}}
        if library.do_center_crop:
            said["crop_size"] = said["size"]
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
        processor = processor_for(self.architecture, self.config, tmp_path)
        image = picture(500, 410)
        (own,) = processor.process([item(image)], {})
        made = type(library)(**said)(images=image, return_tensors="pt")
        np.testing.assert_allclose(
            array(own, "pixel_values"), made["pixel_values"][0].numpy(), atol=1e-5, rtol=0
        )
        assert own.num_tokens == self.num_tokens(made)

    @pytest.mark.parametrize(
        "size", [(1, 500), (700, 2), (20, 20), (337, 336), (801, 799), (99, 1000)]
    )
    def test_counts_are_the_librarys(self, size: tuple[int, int], tmp_path: Path) -> None:
        library = self.library()
        library.save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        image = picture(*size)
        (own,) = processor.process([item(image)], {})
        assert own.num_tokens == self.num_tokens(library(images=image, return_tensors="pt"))

    def test_settings_that_do_not_fit_the_config_are_refused(self, tmp_path: Path) -> None:
        library = self.library()
        library.save_pretrained(tmp_path)
        other = {**self.config, "image_grid_pinpoints": [[self.tile, self.tile]]}
        with pytest.raises(UnsupportedModel, match="image_grid_pinpoints"):
            processor_for(self.architecture, other, tmp_path)
        tower = {**self.config["vision_config"], "image_size": 2 * self.tile}
        with pytest.raises(UnsupportedModel, match="image_size"):
            processor_for(self.architecture, {**self.config, "vision_config": tower}, tmp_path)


class TestLlavaNext(Anyres):
    architecture = "LlavaNextForConditionalGeneration"
    tile = 336
    config: ClassVar = {
        "image_token_index": 32000,
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    }
    settings = ({}, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2})

    def library(self, **settings: Any) -> Any:
        from transformers.models.llava_next.image_processing_pil_llava_next import (
            LlavaNextImageProcessorPil,
        )

        side = {"height": self.tile, "width": self.tile}
        sizes = {"size": {"shortest_edge": self.tile}, "crop_size": side}
        return LlavaNextImageProcessorPil(**{**sizes, **settings})

    def counted(self, library: Any) -> Any:
        from transformers import LlavaNextProcessor

        processor = LlavaNextProcessor.__new__(LlavaNextProcessor)
        processor.image_processor, processor.image_token = library, "<image>"
        processor.patch_size, processor.num_additional_image_tokens = 14, 1
        processor.vision_feature_select_strategy = "default"
        return processor


class TestLlavaNextVideo(TestLlavaNext):
    """Images of the class that takes videos as well."""

    architecture = "LlavaNextVideoForConditionalGeneration"


class TestLlavaOnevision(Anyres):
    architecture = "LlavaOnevisionForConditionalGeneration"
    tile = 384
    config: ClassVar = {
        "image_token_index": 151646,
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    }
    settings = ({}, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2})

    def library(self, **settings: Any) -> Any:
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
            LlavaOnevisionImageProcessorPil,
        )

        return LlavaOnevisionImageProcessorPil(**settings)

    def counted(self, library: Any) -> Any:
        from transformers import LlavaOnevisionProcessor

        processor = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
        processor.image_processor, processor.image_token = library, "<image>"
        processor.num_image_tokens, processor.vision_aspect_ratio = 27 * 27, "anyres_max_9"
        processor.vision_feature_select_strategy = "full"
        return processor

    @pytest.mark.parametrize(
        "size", [(2304, 2304), (2304, 700), (690, 2304), (1900, 801), (3000, 930)]
    )
    def test_large_images(self, size: tuple[int, int], tmp_path: Path) -> None:
        library = self.library()
        library.save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        image = picture(*size)
        (own,) = processor.process([item(image)], {})
        assert own.num_tokens == self.num_tokens(library(images=image, return_tensors="pt"))
        assert own.num_tokens <= processor.largest("image", {}).num_tokens


class TestKinOfLlavaOnevision:
    """R-4B and Bee-8B, whose images are the same."""

    config: ClassVar = TestLlavaOnevision.config

    @pytest.mark.parametrize("name", ["RForConditionalGeneration", "BeeForConditionalGeneration"])
    def test_numbers_are_those_of_llava_onevision(self, name: str, tmp_path: Path) -> None:
        kind = {"image_processor_type": "LlavaOnevisionImageProcessorFast"}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(kind))
        base = processor_for(TestLlavaOnevision.architecture, self.config, tmp_path)
        (own,), (other,) = (
            processor.process([item(picture(500, 410))], {})
            for processor in (processor_for(name, self.config, tmp_path), base)
        )
        assert own == other

    def test_other_processors_are_refused(self, tmp_path: Path) -> None:
        kind = {"image_processor_type": "OtherProcessor"}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(kind))
        with pytest.raises(UnsupportedModel, match="OtherProcessor"):
            processor_for("RForConditionalGeneration", self.config, tmp_path)

    @pytest.mark.parametrize("size", [(2304, 2304), (1900, 801), (3000, 930)])
    def test_no_image_is_made_smaller(self, size: tuple[int, int], tmp_path: Path) -> None:
        """As the published formula counts, which is the library's without its last step."""
        own, other = (
            processor_for("RForConditionalGeneration", {**self.config, **ratio}, tmp_path)
            for ratio in (
                {"vision_aspect_ratio": "anyres"},
                {"vision_aspect_ratio": "anyres_max_1000"},
            )
        )
        assert own.num_tokens(size) == other.num_tokens(size)  # type: ignore[attr-defined]
        assert own.num_tokens(size) <= own.largest("image", {}).num_tokens  # type: ignore[attr-defined]
