"""The image processor of Llama 3.1 Nemotron Nano VL beside a plain reading of what is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from PIL import Image
from speech_checkpoints import save_tokenizer, token_ids
from test_image_processors import array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for
from headrace_multimodal.tiles.nemotron_vl import grid_of

SIDE, PER_TILE = 32, 4
CONFIG = {"force_image_size": SIDE, "patch_size": 8, "downsample_ratio": 0.5}
SIDES = st.integers(1, 2000)


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path, ("<image>", "<img>", "</img>"))
    return processor_for("Llama_Nemotron_Nano_VL", CONFIG, tmp_path)


def published(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """The published rule: the first grid that has the highest factor."""
    ratios = {
        (i, j)
        for n in range(1, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if 1 <= i * j <= most
    }
    best, factor = (1, 1), float("-inf")
    for columns, rows in sorted(ratios, key=lambda ratio: ratio[0] * ratio[1]):
        target, own = columns / rows, width / height
        size = min((columns * rows * side * side) / (width * height), 0.6)
        found = size * min(target / own, own / target)
        if found > factor:
            best, factor = (columns, rows), found
    return best


@given(SIDES, SIDES, st.integers(1, 12))
@examples(max_examples=100, deadline=None)
def test_grids(height: int, width: int, most: int) -> None:
    assert grid_of((height, width), 512, most) == published(width, height, 512, most)


@pytest.mark.parametrize("size", [(37, 61), (64, 64), (90, 31), (300, 211), (20, 20)])
def test_numbers_and_tokens(size: tuple[int, int], processor: Any, tmp_path: Path) -> None:
    image = picture(*size)
    columns, rows = published(image.width, image.height, SIDE, 12)
    large = image.resize((columns * SIDE, rows * SIDE), Image.Resampling.BICUBIC)
    tiles = [
        large.crop((c * SIDE, r * SIDE, (c + 1) * SIDE, (r + 1) * SIDE))
        for r in range(rows)
        for c in range(columns)
    ]
    if len(tiles) > 1:
        tiles.append(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    expected = np.stack([np.asarray(x).transpose(2, 0, 1) for x in tiles]).astype(np.float32) / 255
    (own,) = processor.process([item(image)], {})
    np.testing.assert_allclose(array(own, "pixel_values"), expected, atol=1e-5)
    inner = "<image>" * PER_TILE * len(tiles)
    placed = processor.place(token_ids(tmp_path, "the <image>\nwater"), [own])
    assert placed.token_ids == token_ids(tmp_path, f"the <img>{inner}</img>\nwater")
    (one,) = processor.process([item(image)], {"max_num_tiles": 1})
    assert array(one, "pixel_values").shape == (1, 3, SIDE, SIDE)
    assert processor.largest("image", {}).num_tokens == 13 * PER_TILE + 2 >= own.num_tokens


def test_what_is_refused(processor: Any, tmp_path: Path) -> None:
    for value in (0, 13, "4"):
        with pytest.raises(RequestError, match=f"max_num_tiles = {value!r}"):
            processor.process([item(picture(9, 9))], {"max_num_tiles": value})
    for stated, config, named in (
        ({"image_size": 64}, CONFIG, "image_size = 64"),
        ({"max_num_tiles": 0}, CONFIG, "max_num_tiles = 0"),
        ({}, {}, "force_image_size = None"),
        ({}, {**CONFIG, "downsample_ratio": 2}, "downsample_ratio = 2"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
        with pytest.raises(UnsupportedModel, match=named):
            processor_for("Llama_Nemotron_Nano_VL", config, tmp_path)
