"""DeepSeek-OCR's image processor beside a plain reading of the published code; its tiles beside those that
transformers makes for DeepSeek-OCR 2, by the same rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from speech_checkpoints import save_tokenizer, token_ids
from test_image_processors import array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

NAME = "DeepseekOCRForCausalLM"


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path, ("<image>",))
    stated = {"patch_size": 16, "downsample_ratio": 4, "normalize": True, "image_mean": [0.5] * 3,
              "image_std": [0.5] * 3, "candidate_resolutions": [[1024, 1024]]}  # fmt: skip
    (tmp_path / "processor_config.json").write_text(json.dumps(stated))
    return processor_for(NAME, {"vision_config": {}}, tmp_path)


def numbers(image: Image.Image) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.asarray(image).transpose(2, 0, 1) / 127.5 - 1
    return found


def on_grey(image: Image.Image, side: int) -> np.ndarray[Any, Any]:
    return numbers(ImageOps.pad(image, (side, side), color=(127, 127, 127)))


@pytest.mark.parametrize(
    ("size", "most"), [((700, 500), 9), ((300, 1400), 6), ((641, 641), 9), ((450, 905), 9)]
)
def test_pages_in_tiles(size: tuple[int, int], most: int, processor: Any) -> None:
    from transformers.models.deepseek_ocr2 import image_processing_pil_deepseek_ocr2 as library

    image = picture(*size)
    made = library.DeepseekOcr2ImageProcessorPil(tile_size=640, min_patches=2, max_patches=most)
    theirs = made(images=image, return_tensors="np")
    (own,) = processor.process([item(image)], {"max_crops": most})
    np.testing.assert_allclose(array(own, "pixel_values")[0], on_grey(image, 1024), atol=1e-5)
    local = array(own, "pixel_values_local")
    np.testing.assert_allclose(local, theirs["pixel_values_local"], atol=1e-5)
    columns, rows = array(own, "patches_grid").tolist()
    assert columns * rows == len(local) == int(theirs["num_local_patches"][0])
    assert own.num_tokens == 16 * 17 + 1 + 10 * rows * (10 * columns + 1)


@pytest.mark.parametrize("size", [(640, 500), (30, 64), (640, 640)])
def test_small_pages(size: tuple[int, int], processor: Any) -> None:
    image = picture(*size)
    (own,) = processor.process([item(image)], {})
    np.testing.assert_allclose(array(own, "pixel_values")[0], on_grey(image, 1024), atol=1e-5)
    assert "pixel_values_local" not in own.inputs
    assert own.num_tokens == 16 * 17 + 1


@pytest.mark.parametrize(("side", "count"), [(512, 73), (640, 111), (1280, 421)])
def test_pages_without_tiles(side: int, count: int, processor: Any) -> None:
    image = picture(700, 500)
    (own,) = processor.process([item(image)], {"crop_mode": False, "base_size": side})
    small = image.resize((side, side), Image.Resampling.BICUBIC)
    expected = numbers(small) if side <= 640 else on_grey(image, side)
    np.testing.assert_allclose(array(own, "pixel_values")[0], expected, atol=1e-5)
    assert own.num_tokens == count


def test_prompts(processor: Any, tmp_path: Path) -> None:
    media = processor.process([item(picture(90, 61)), item(picture(800, 61))], {})
    text = "the <image>\nof <image> water"
    placed = processor.place(token_ids(tmp_path, text), media)
    for one in media:
        text = text.replace("<image>", "IMAGE" * one.num_tokens, 1)
    assert placed.token_ids == token_ids(tmp_path, text.replace("IMAGE", "<image>"))
    largest = processor.largest("image", {})
    assert largest.num_tokens == 16 * 17 + 1 + 90 * 11 >= media[1].num_tokens
    assert processor.largest("image", {"num_tokens": 300}).num_tokens == 16 * 17 + 1


def test_what_is_refused(processor: Any, tmp_path: Path) -> None:
    for option, value in (
        ("crop_mode", 1), ("base_size", 768), ("max_crops", 10), ("image_size", 640),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=f"mm_processor_kwargs.{option}"):
            processor.process([item(picture(9, 9))], {option: value})
    with pytest.raises(RequestError, match="3000 x 1 pixels: is too narrow"):
        processor.process([item(picture(1, 3000))], {})
    (tmp_path / "processor_config.json").write_text(json.dumps({"patch_size": 14}))
    with pytest.raises(UnsupportedModel, match="patch_size = 14: must be 16"):
        processor_for(NAME, {"vision_config": {}}, tmp_path)
