"""Image processors beside those of the checkpoints' own library, on pictures of odd sizes: numbers, and
tokens of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal import content_hash, processor_for
from headrace_testing.sampling import turns

SIZES = ((37, 61), (64, 64), (90, 31), (300, 211))
"""Height and width."""


def picture(height: int, width: int) -> Image.Image:
    noise = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def item(image: Image.Image) -> MediaItem:
    pixels = np.asarray(image)
    return MediaItem("image", pixels, content_hash("image", pixels), {})


def array(media: ProcessedMedia, name: str) -> np.ndarray[Any, Any]:
    packed = media.inputs[name]
    return np.frombuffer(packed.data, packed.dtype).reshape(packed.shape)


@turns(3)
class ProcessorConformance:
    """What a subclass must say: the architecture, its config, and the library's image processor."""

    architecture: ClassVar[str]
    config: ClassVar[Mapping[str, Any]]
    settings: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Settings of ``preprocessor_config.json`` that are tried."""
    inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def library(self, **settings: Any) -> Any:
        """The image processor of transformers."""
        raise NotImplementedError

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        """Tokens of one image, as the library's processor counts them."""
        raise NotImplementedError

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        """An input of one image, without the axis of images."""
        found: torch.Tensor = made[name]
        return found[0].numpy()

    @turns(1)
    @pytest.mark.parametrize("size", SIZES)
    def test_numbers_are_the_librarys(self, size: tuple[int, int], tmp_path: Path) -> None:
        for number, settings in enumerate(self.settings):
            library, folder = self.library(**settings), tmp_path / str(number)
            library.save_pretrained(folder)
            processor = processor_for(self.architecture, self.config, folder)
            image = picture(*size)
            (own,) = processor.process([item(image)], {})
            made = library(images=image, return_tensors="pt")
            for name in self.inputs:
                np.testing.assert_allclose(
                    array(own, name), self.theirs(made, name), atol=1e-5, rtol=0
                )
            assert own.num_tokens == self.num_tokens(made)
            taken = {id for first, n in own.runs for id in own.token_ids[first : first + n]}
            assert taken <= set(processor.placeholder_ids), "no text alone may have these"

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        library = self.library()
        (tmp_path / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": type(library).__name__})
        )
        processor = processor_for(self.architecture, self.config, tmp_path)
        image = picture(70, 40)
        (own,) = processor.process([item(image)], {})
        made = type(library)()(images=image, return_tensors="pt")
        for name in self.inputs:
            np.testing.assert_allclose(array(own, name), self.theirs(made, name), atol=1e-5, rtol=0)

    def test_no_image_takes_more_than_the_largest(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        most = processor.largest("image", {}).num_tokens
        for size in (*SIZES, (1500, 1500), (900, 2600)):
            (own,) = processor.process([item(picture(*size))], {})
            assert own.num_tokens <= most

    def test_an_image_of_fewer_tokens(self, tmp_path: Path) -> None:
        """For measuring: no more than asked for, or as few as any."""
        self.library().save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        (least,) = processor.process([item(picture(8, 8))], {})
        for most in (1, 100, 1000):
            found = processor.largest("image", {"num_tokens": most})
            assert found.num_tokens <= max(most, least.num_tokens)


class TestLlava(ProcessorConformance):
    architecture = "LlavaForConditionalGeneration"
    config: ClassVar = {
        "image_token_index": 32000,
        "vision_config": {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 14},
    }
    settings = (
        {},
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        {"size": {"height": 42, "width": 56}, "do_center_crop": False, "resample": 2},
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 56, "width": 42}},
        {"size": {"shortest_edge": 56}, "crop_size": 56, "do_normalize": False},
    )

    def library(self, **settings: Any) -> Any:
        from transformers import CLIPImageProcessor

        return CLIPImageProcessor(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        height, width = made["pixel_values"].shape[-2:]
        return (height // 14) * (width // 14)


class TestVideoLlava(TestLlava):
    """Images of the class that takes videos as well; all must be of the tower's size."""

    architecture = "VideoLlavaForConditionalGeneration"
    settings = ({}, {"resample": 2}, {"size": {"shortest_edge": 250}, "do_normalize": False})

    def test_images_of_another_size_than_the_towers_are_refused(self, tmp_path: Path) -> None:
        self.library(crop_size={"height": 56, "width": 56}).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=r"image processor: makes images of \(56, 56\)"):
            processor_for(self.architecture, self.config, tmp_path)


class TestLlavaOfSiglip(ProcessorConformance):
    architecture = "LlavaForConditionalGeneration"
    config: ClassVar = {
        "image_token_index": 32000, "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 16},
    }  # fmt: skip
    settings = ({}, {"size": {"height": 64, "width": 48}, "resample": 3})

    def library(self, **settings: Any) -> Any:
        from transformers import SiglipImageProcessor

        return SiglipImageProcessor(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        height, width = made["pixel_values"].shape[-2:]
        return (height // 16) * (width // 16)


class TestQwen2VL(ProcessorConformance):
    architecture = "Qwen2VLForConditionalGeneration"
    config: ClassVar = {"image_token_id": 151655, "vision_config": {}}
    settings = (
        {},
        {"min_pixels": 784, "max_pixels": 28 * 28 * 20},
        {"size": {"shortest_edge": 28 * 28 * 40, "longest_edge": 28 * 28 * 60}},
        {"patch_size": 16, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    )
    inputs = ("pixel_values", "image_grid_thw")

    def library(self, **settings: Any) -> Any:
        from transformers import Qwen2VLImageProcessor

        return Qwen2VLImageProcessor(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        found: torch.Tensor = made[name]
        return (found[0] if name == "image_grid_thw" else found).numpy()

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return int(made["image_grid_thw"].prod()) // 4
