"""Processors of models that see images at their own size, beside those of the checkpoints' own library:
numbers, tokens of prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from speech_checkpoints import save_tokenizer, token_ids
from test_image_processors import ProcessorConformance, array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
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


@pytest.mark.parametrize("name", ["Glm4v", "Keye", "Qwen3VL"])
def test_a_narrow_image_is_refused_by_its_own_size(name: str, tmp_path: Path) -> None:
    """Not by that to which it was brought first."""
    said = {"min_pixels": 784, "max_pixels": 7840}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    own = processor_for(f"{name}ForConditionalGeneration", NativeSize.config, tmp_path)
    if name == "Qwen3VL":  # whose images are Qwen2-VL's
        frames = np.zeros((2, 3, 900, 3), np.uint8)
        narrow = MediaItem("video", frames, "0", {})
    else:
        narrow = item(picture(3, 900))
    with pytest.raises(RequestError, match="of 900 x 3 pixels: one side is more than 200 times"):
        own.process([narrow], {})


class TestDotsOCR(NativeSize):
    """Patches of one frame."""

    architecture = "DotsOCRForCausalLM"
    config: ClassVar = {"image_token_id": 4, "vision_config": {}}
    settings = (
        {"temporal_patch_size": 1},
        {"temporal_patch_size": 1, "min_pixels": 28 * 28 * 40, "max_pixels": 28 * 28 * 60},
    )

    def library(self, **settings: Any) -> Any:
        from transformers import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(**{"temporal_patch_size": 1, **settings})

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """But for the patches' frames, of which the model has one."""
        (tmp_path / "preprocessor_config.json").write_text("{}")
        own = processor_for(self.architecture, self.config, tmp_path)
        (made,) = own.process([item(picture(70, 40))], {})
        theirs = self.library()(images=picture(70, 40), return_tensors="pt")["pixel_values"]
        np.testing.assert_allclose(array(made, "pixel_values"), theirs, atol=1e-5, rtol=0)


class TestOpenCUA(NativeSize):
    architecture = "OpenCUAForConditionalGeneration"
    config: ClassVar = {"media_placeholder_token_id": 4, "vision_config": {}}
    settings = ({"max_pixels": 28 * 28 * 60},)

    def library(self, **settings: Any) -> Any:
        from transformers import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(**settings)

    def test_prompt(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        media = own.process([item(picture(90, 61)), item(picture(56, 56))], {})
        assert own.place([1, 4, 2, 4, 3], media).token_ids == [1, *[4] * 6, 2, *[4] * 4, 3]


class TestHunYuanVL(NativeSize):
    """Patches come square by square; the library's, row by row. Its setting of a filter has no effect."""

    architecture = "HunYuanVLForConditionalGeneration"
    config: ClassVar = {"image_token_id": 4, "vision_config": {}}
    settings = (
        {"size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 20}, "resample": 1},
        {"min_pixels": 32 * 32 * 40, "max_pixels": 32 * 32 * 60},
    )

    def library(self, **settings: Any) -> Any:
        from transformers.models.hunyuan_vl import image_processing_pil_hunyuan_vl as library

        return library.HunYuanVLImageProcessorPil(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        return square_by_square(made, name)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor

        whole = HunYuanVLProcessor.__new__(HunYuanVLProcessor)
        whole.image_processor, whole.image_token = self.library(), "."
        whole.cat_extra_token = True
        return len(whole.replace_image_token(made, 0))

    def test_prompt(self, tmp_path: Path) -> None:
        self.library(**self.settings[0]).save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        media = own.process([item(picture(90, 61)), item(picture(64, 64))], {})
        counts = [3 * 3 + 2, 2 * 3 + 2]
        placed = own.place([1, 4, 2, 4, 3], media)
        assert placed.token_ids == [1, *[4] * counts[0], 2, *[4] * counts[1], 3]
        assert placed.offsets == [1, counts[0] + 2]

    def test_vectors(self, tmp_path: Path) -> None:
        """As many of an image of a stated grid."""
        self.library().save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        assert own.embedded("image", 11, {"image_grid_thw": [1, 6, 4]}).num_tokens == 11


def square_by_square(made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
    """An input of one image by a library that has patches row by row."""
    _, height, width = made["image_grid_thw"][0].tolist()
    if name == "image_grid_thw":
        return np.array([1, height, width])
    rows = made["pixel_values"].reshape(height // 2, 2, width // 2, 2, -1)
    return rows.transpose(1, 2).flatten(0, 3).numpy()


class TestKeye(NativeSize):
    """Its formula of sizes is that of PaddleOCR-VL, whose patches come row by row."""

    architecture = "KeyeForConditionalGeneration"
    config: ClassVar = {"image_token_id": 4, "vision_config": {}}
    settings = (
        {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 20},
        {"size": {"shortest_edge": 28 * 28 * 40, "longest_edge": 28 * 28 * 60}},
    )

    def library(self, **settings: Any) -> Any:
        from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as library

        bounds = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 1280}
        return library.PaddleOCRVLImageProcessorPil(**(settings or bounds))

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        return square_by_square(made, name)

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """Bounds of sizes must be there."""
        for name in ("Keye", "KeyeVL1_5"):
            with pytest.raises(UnsupportedModel, match="min_pixels and max_pixels, or size"):
                processor_for(f"{name}ForConditionalGeneration", self.config, tmp_path)

    @pytest.mark.parametrize("size", [(9, 300), (300, 9), (20, 20)])
    def test_narrow_images(self, size: tuple[int, int], tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        (made,) = own.process([item(picture(*size))], {})
        theirs = self.library()(images=picture(*size), return_tensors="pt")
        assert array(made, "image_grid_thw").tolist() == theirs["image_grid_thw"][0].tolist()


class TestErnie4_5VL(NativeSize):
    """Patches of one frame, whatever the settings say of videos."""

    architecture = "Ernie4_5_VLMoeForConditionalGeneration"
    config: ClassVar = {"im_patch_id": 4, "vision_config": {}}
    settings = (
        {"temporal_patch_size": 2},
        {"size": {"shortest_edge": 28 * 28 * 40, "longest_edge": 28 * 28 * 60}},
    )

    def library(self, **settings: Any) -> Any:
        from transformers.models.ernie4_5_vl_moe import image_processing_pil_ernie4_5_vl_moe

        made: Any = image_processing_pil_ernie4_5_vl_moe
        library = made.Ernie4_5_VLMoeImageProcessorPil(**{**settings, "temporal_patch_size": 1})
        library.temporal_patch_size = 1
        return library

    def test_prompt(self, tmp_path: Path) -> None:
        """As chat templates write it, which is no token; and as the library does."""
        ids = save_tokenizer(
            tmp_path, ("<|endoftext|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>")
        )
        self.library().save_pretrained(tmp_path)
        mark = ids["<|IMAGE_PLACEHOLDER|>"]
        own = processor_for(self.architecture, {**self.config, "im_patch_id": mark}, tmp_path)
        media = own.process([item(picture(90, 61)), item(picture(56, 56))], {})
        text = "the<|IMAGE_START|>HERE water<|IMAGE_START|>HERE runs"
        given = text.replace("HERE", "<|image@placeholder|>")
        counts = [one.num_tokens for one in media]
        wanted = text.replace("HERE", "<|IMAGE_PLACEHOLDER|>" * counts[0], 1)
        wanted = wanted.replace("HERE", "<|IMAGE_PLACEHOLDER|>" * counts[1], 1)
        placed = own.place(token_ids(tmp_path, given), media)
        assert placed.token_ids == token_ids(tmp_path, wanted)
        plain = token_ids(tmp_path, text.replace("HERE", "<|IMAGE_PLACEHOLDER|>"))
        assert own.place(plain, media).token_ids == placed.token_ids


class PlainKimi:
    """The image processors of Kimi-VL and Kimi K2.5, which need torchvision or are code of checkpoints, by
    their published description: Pillow's numbers, and an edge that is black before colours are normalised.

    Args:
        settings: of ``preprocessor_config.json``.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def size(self, height: int, width: int) -> tuple[int, int]:
        patch, limit = 14, self.limit()
        count = (height // patch) * (width // patch)
        scale = math.sqrt(limit / count) if count > limit else 1
        return int(height * scale), int(width * scale)

    def limit(self) -> int:
        return int(self.settings.get("in_token_limit", 4096))

    def __call__(self, images: Image.Image, return_tensors: str) -> dict[str, torch.Tensor]:
        height, width = self.size(images.height, images.width)
        small = images.resize((width, height), Image.Resampling.BICUBIC)
        whole = Image.new("RGB", (-(-width // 28) * 28, -(-height // 28) * 28))
        whole.paste(small, (0, 0))
        x = torch.tensor(np.asarray(whole)).permute(2, 0, 1).float() / 255
        mean, std = (
            torch.tensor(self.colours(key)).view(3, 1, 1) for key in ("image_mean", "image_std")
        )
        cut = ((x - mean) / std).unfold(1, 14, 14).unfold(2, 14, 14)
        return {
            "pixel_values": cut.permute(1, 2, 0, 3, 4).reshape(-1, 3 * 14 * 14),
            "image_grid_hws": torch.tensor([cut.shape[1:3]]),
        }

    def colours(self, key: str) -> list[float]:
        from transformers import image_utils

        name = "OPENAI_CLIP_MEAN" if key == "image_mean" else "OPENAI_CLIP_STD"
        return list(self.settings.get(key, getattr(image_utils, name)))


class TestKimiVL(NativeSize):
    architecture = "KimiVLForConditionalGeneration"
    config: ClassVar = {"media_placeholder_token_id": 4, "vision_config": {"patch_size": 14}}
    settings = (
        {"pad_input": True},
        {"pad_input": True, "in_token_limit": 60, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    )
    inputs = ("pixel_values", "image_grid_hws")

    def library(self, **settings: Any) -> Any:
        return PlainKimi(**settings or {"pad_input": True})

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        found: torch.Tensor = made[name]
        return (found[0] if name == "image_grid_hws" else found).numpy()

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return int(made["image_grid_hws"].prod()) // 4

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """By default images are cut, which no published checkpoint does."""
        for settings in ({}, {"pad_input": False}):
            self.library(**{"patch_size": 14, **settings}).save_pretrained(tmp_path)
            with pytest.raises(UnsupportedModel, match="pad_input = False"):
                processor_for(self.architecture, self.config, tmp_path)

    def test_prompt(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        media = own.process([item(picture(90, 61)), item(picture(20, 20))], {})
        placed = own.place([1, 4, 2, 4, 3], media)
        assert placed.token_ids == [1, *[4] * 12, 2, 4, 3]

    def test_an_image_that_is_too_long(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        (long,) = own.process([item(picture(28, 510 * 14))], {})
        assert long.num_tokens == 255
        with pytest.raises(RequestError, match=r"7141 x 28 pixels: .* more than 511 patches"):
            own.process([item(picture(28, 510 * 14 + 1))], {})


class PlainKimiK25(PlainKimi):
    """transformers' formula of sizes."""

    def limit(self) -> int:
        own = self.settings.get("media_proc_cfg", self.settings)
        return int(own.get("in_patch_limit", own.get("max_patches", 16384)))

    def size(self, height: int, width: int) -> tuple[int, int]:
        count = max(1, height // 14) * max(1, width // 14)
        longest = 14 * int(self.settings.get("size", {"max_height": 512})["max_height"])
        scale = min(1, math.sqrt(self.limit() / count), longest / height, longest / width)
        return max(1, int(height * scale)), max(1, int(width * scale))

    def colours(self, key: str) -> list[float]:
        return [0.5] * 3


class TestKimiK25(TestKimiVL):
    architecture = "KimiK25ForConditionalGeneration"
    config: ClassVar = {"image_token_id": 4, "vision_config": {}}
    settings = (
        {},
        {"max_patches": 60, "size": {"max_height": 16, "max_width": 16}},
        {
            "media_proc_cfg": {
                "in_patch_limit": 60,
                "merge_kernel_size": 2,
                "fixed_output_tokens": None,
            }
        },
    )

    def library(self, **settings: Any) -> Any:
        return PlainKimiK25(**settings)

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        self.library(media_proc_cfg={"fixed_output_tokens": 9}).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="fixed_output_tokens = 9"):
            processor_for(self.architecture, self.config, tmp_path)

    def test_an_image_that_is_too_long(self, tmp_path: Path) -> None:
        """It becomes smaller."""
        self.library(size={"max_height": 16, "max_width": 16}).save_pretrained(tmp_path)
        own = processor_for(self.architecture, self.config, tmp_path)
        (long,) = own.process([item(picture(28, 448))], {})
        assert array(long, "image_grid_hws").tolist() == [2, 16]
