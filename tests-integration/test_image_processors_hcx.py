"""Images of HyperCLOVA X Seed Vision 3B beside a plain reading of the published code, on CLIP's processor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_image_processors import array, item, picture
from transformers import CLIPImageProcessor

from headrace_core.errors import UnsupportedModel
from headrace_multimodal import processor_for

NAME = "HCXVisionForCausalLM"
SIDE, ROW = 378, 9
SIZES = [
    [rows * SIDE, columns * SIDE]
    for rows in range(1, 7)
    for columns in range(1, 7)
    if rows * columns <= 6
]
STATED = {
    "anyres": True, "unpad": True, "pad_to_square": True, "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE}, "patch_size": 14, "possible_resolutions": SIZES,
    "num_queries_vis_abstractor": 81, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5] * 3,
}  # fmt: skip
CONFIG = {
    "image_token_id": 100271, "num_queries_vis_abstractor_image": 81, "max_num_grids": 6,
    "use_1x1_grid": True,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": 14},
}  # fmt: skip
COLOUR = (127, 102, 76)


def made(folder: Path, **changed: Any) -> Any:
    (folder / "preprocessor_config.json").write_text(json.dumps({**STATED, **changed}))
    return processor_for(NAME, CONFIG, folder)


def best(height: int, width: int) -> tuple[int, int]:
    found, most, least = (0, 0), 0, float("inf")
    for rows, columns in SIZES:
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = rows * columns - kept
        if kept > most or (kept == most and wasted < least):
            found, most, least = (rows, columns), kept, wasted
    return found


def count(height: int, width: int) -> int:
    """As the published processor counts."""
    rows, columns = (side // SIDE * ROW for side in best(height, width))
    if width / height > columns / rows:
        rows -= (rows - int(height * (columns / width))) // 2 * 2
    else:
        columns -= (columns - int(width * (rows / height))) // 2 * 2
    return columns * rows + rows + ROW**2


def square(image: Image.Image) -> Image.Image:
    """The longest side first, then the mean's colour beside it."""
    width, height = image.size
    if width >= height:
        size = SIDE, math.ceil(height / width * SIDE)
    else:
        size = math.ceil(width / height * SIDE), SIDE
    found = Image.new("RGB", (SIDE, SIDE), COLOUR)
    found.paste(image.resize(size), ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2))
    return found


@pytest.mark.parametrize(
    "size", [(37, 61), (300, 211), (700, 500), (333, 1001), (378, 378), (1, 900), (2000, 800)]
)
def test_tiles(size: tuple[int, int], tmp_path: Path) -> None:
    processor = made(tmp_path)
    image, (height, width) = picture(*size), size
    (own,) = processor.process([item(image)], {})
    rows, columns = best(height, width)
    if columns / width < rows / height:
        fitted = columns, min(math.ceil(height * (columns / width)), rows)
    else:
        fitted = min(math.ceil(width * (rows / height)), columns), rows
    canvas = Image.new("RGB", (columns, rows), COLOUR)
    canvas.paste(image.resize(fitted), ((columns - fitted[0]) // 2, (rows - fitted[1]) // 2))
    pieces = [square(image)]
    pieces += [
        canvas.crop((x, y, x + SIDE, y + SIDE))
        for y in range(0, rows, SIDE)
        for x in range(0, columns, SIDE)
    ]
    plain = CLIPImageProcessor(
        do_resize=False, do_center_crop=False, image_mean=[0.5, 0.4, 0.3], image_std=[0.5] * 3
    )
    expected = plain(images=pieces, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(array(own, "pixel_values"), expected, atol=1e-5, rtol=0)
    assert own.num_tokens == count(height, width)
    assert own.num_tokens <= processor.largest("image", {}).num_tokens
    assert processor.placeholder_ids == (100271,)


def test_stretched_where_the_settings_say_so(tmp_path: Path) -> None:
    image = picture(50, 90)
    (own,) = made(tmp_path, pad_to_square=False).process([item(image)], {})
    expected = np.asarray(image.resize((SIDE, SIDE)), np.float32).transpose(2, 0, 1) / 255
    expected = (expected - np.array([0.5, 0.4, 0.3], np.float32)[:, None, None]) / 0.5
    np.testing.assert_allclose(array(own, "pixel_values")[0], expected, atol=1e-5, rtol=0)


def test_what_is_refused(tmp_path: Path) -> None:
    for change, words in (
        ({"anyres": False}, "anyres = False"),
        ({"unpad": False}, "unpad = False"),
        ({"possible_resolutions": SIZES[1:]}, "possible_resolutions"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            made(tmp_path, **change)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(STATED))
    with pytest.raises(UnsupportedModel, match="num_queries_vis_abstractor_image = 80"):
        processor_for(NAME, {**CONFIG, "num_queries_vis_abstractor_image": 80}, tmp_path)
