"""Images of Isaac beside a plain reading of the published code: sizes by its search, torch's resizing of
bytes, patches row by row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kin_checkpoints import save_isaac
from speech_checkpoints import save_tokenizer, token_ids
from test_image_processors import array, item, picture
from torch.nn import functional

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

ISAAC = "IsaacForConditionalGeneration"
CONFIG: dict[str, Any] = {
    "vision_config": {"patch_size": 16, "pixel_shuffle_scale_factor": 2}, "pixel_shuffle_scale": 2,
    "vision_max_num_patches": 300, "vision_min_num_patches": 64,
}  # fmt: skip
SIZES = ((37, 61), (256, 256), (700, 500), (31, 400), (1, 40), (90, 640), (129, 130))


def target(height: int, width: int) -> tuple[int, int]:
    """Of 64 to 300 patches of 16 pixels, in squares of two."""

    def scaled(scale: float, side: int) -> int:
        return max(32, math.ceil(scale * side / 32) * 32)

    def patches(scale: float) -> float:
        return scaled(scale, height) / 16 * (scaled(scale, width) / 16)

    if patches(1.0) < 64:
        low, high = 1.0, 100.0
        while high - low >= 1e-5:
            scale = (low + high) / 2
            if patches(scale) >= 64:
                high = scale
            else:
                low = scale
        return scaled(high, height), scaled(high, width)
    if patches(1.0) <= 300:
        return scaled(1.0, height), scaled(1.0, width)
    low, high = 1e-6, 1.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        if patches(scale) <= 300:
            low = scale
        else:
            high = scale
    return scaled(low, height), scaled(low, width)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_isaac(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", SIZES)
def test_images(size: tuple[int, int], folder: Path) -> None:
    image = picture(*size)
    processor = processor_for(ISAAC, CONFIG, folder)
    (own,) = processor.process([item(image)], {})
    height, width = target(*size)
    x = torch.from_numpy(np.asarray(image).copy())[None].permute(0, 3, 1, 2)
    x = functional.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)
    x = (x[0].permute(1, 2, 0).float() * (1 / 255) - 0.5) / 0.5
    rows, columns = height // 16, width // 16
    x = x.view(rows, 16, columns, 16, 3).permute(0, 2, 1, 3, 4).reshape(rows * columns, -1)
    np.testing.assert_allclose(array(own, "pixel_values"), x, atol=1e-5, rtol=0)
    assert array(own, "image_grid_thw").tolist() == [1, rows, columns]
    assert own.num_tokens == rows * columns // 4
    assert own.num_tokens <= processor.largest("image", {}).num_tokens == 75


def test_settings_of_a_file_of_their_own(folder: Path) -> None:
    stated = {"max_num_patches": 100, "pixel_shuffle_scale": 2, "patch_size": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    (own,) = processor_for(ISAAC, CONFIG, folder).process([item(picture(700, 500))], {})
    assert own.num_tokens == 24


def test_prompts(folder: Path) -> None:
    processor = processor_for(ISAAC, CONFIG, folder)
    [mark], media = token_ids(folder, "<image>"), processor.process([item(picture(64, 300))], {})
    a, b = token_ids(folder, "ab")
    run = [mark] * media[0].num_tokens
    assert processor.place(token_ids(folder, "a<image>b"), media).token_ids == [a, *run, b]
    assert processor.placeholder_ids == (mark,)
    assert processor.embedded("image", 1, {"image_grid_thw": [1, 4, 6]}).num_tokens == 6
    with pytest.raises(RequestError, match="in multiples of 2"):
        processor.embedded("image", 1, {"image_grid_thw": [1, 3, 6]})


def test_a_mark_that_is_no_token(tmp_path: Path) -> None:
    """Texts around it become tokens one by one."""
    save_tokenizer(tmp_path, ("<|endoftext|>",))
    processor = processor_for(ISAAC, CONFIG, tmp_path)
    media = processor.process([item(picture(64, 300))], {})
    first = token_ids(tmp_path, "<image>")[0]
    placed = processor.place(token_ids(tmp_path, "the <image> race"), media)
    run = [first] * media[0].num_tokens
    assert placed.token_ids == [*token_ids(tmp_path, "the "), *run, *token_ids(tmp_path, " race")]
    assert processor.placeholder_ids == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pixel_shuffle_scale": 1}, "pixel_shuffle_scale_factor = 2"),
        ({"vision_max_num_patches": 50}, "max_num_patches = 50"),
        ({"vision_max_num_patches": "x"}, "max_num_patches = 'x'"),
        ({"vision_token": 3}, "vision_token = 3"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        processor_for(ISAAC, {**CONFIG, **changed}, folder)
