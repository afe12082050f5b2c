"""Images of Tarsier and MiniMax-VL-01 beside plain readings of the published code, on CLIP's processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_image_processors import array, item, picture
from transformers import CLIPImageProcessor

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

SIZES = ((37, 61), (64, 64), (90, 31), (300, 211), (1, 40))
TARSIER, MINIMAX = "TarsierForConditionalGeneration", "MiniMaxVL01ForConditionalGeneration"


def tower(side: int, patch: int) -> dict[str, Any]:
    return {"model_type": "clip_vision_model", "image_size": side, "patch_size": patch}


@pytest.fixture
def tarsier(tmp_path: Path) -> Any:
    """Without the ids, which are the class's defaults."""
    CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    ).save_pretrained(tmp_path)
    return processor_for(TARSIER, {"vision_config": tower(28, 7)}, tmp_path)


@pytest.mark.parametrize("size", SIZES)
def test_tarsiers_images_are_squares(size: tuple[int, int], tarsier: Any, tmp_path: Path) -> None:
    image = picture(*size)
    (own,) = tarsier.process([item(image)], {})
    side = max(size)
    made = CLIPImageProcessor.from_pretrained(tmp_path)(
        images=image.resize((side, side)), return_tensors="np"
    )
    np.testing.assert_allclose(
        array(own, "pixel_values"), made["pixel_values"][0], atol=1e-5, rtol=0
    )
    assert own.token_ids == (*(*[32000] * 4, 32002) * 4, 32003)
    assert own.runs == ((0, 4), (5, 4), (10, 4), (15, 4))


def test_tarsiers_prompts_and_vectors(tarsier: Any) -> None:
    media = tarsier.process([item(picture(9, 9)), item(picture(8, 30))], {})
    placed = tarsier.place([5, 32000, 6, 32000], media)
    run = list(media[0].token_ids)
    assert placed.token_ids == [5, *run, 6, *run]
    assert list(placed.offsets) == [1, 23]
    assert tarsier.placeholder_ids == (32000,)
    assert tarsier.embedded("image", 16, {}).runs == media[0].runs
    assert tarsier.largest("image", {}).num_tokens == 21


def test_what_tarsier_refuses(tarsier: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"image of 1 x 9000 pixels: this model makes a square"):
        tarsier.process([item(picture(9000, 1))], {})
    with pytest.raises(RequestError, match=r"mm_processor_kwargs\.size"):
        tarsier.process([item(picture(9, 9))], {"size": 3})
    for change, words in (
        ({"vision_feature_select_strategy": "full"}, "17 states"),
        ({"image_newline_idx": "x"}, "image_newline_idx must be a token id"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            processor_for(TARSIER, {"vision_config": tower(28, 7), **change}, tmp_path)


PINPOINTS = [[336, 336], [336, 672], [672, 336], [672, 672], [336, 1008]]


@pytest.fixture
def minimax(tmp_path: Path) -> Any:
    stated = {"process_image_mode": "anyres", "patch_size": 14, "image_grid_pinpoints": PINPOINTS,
              "size": {"height": 336, "width": 336}}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    config = {"vision_config": tower(336, 14), "image_grid_pinpoints": PINPOINTS}
    return processor_for(MINIMAX, config, tmp_path)


def best(height: int, width: int) -> tuple[int, int]:
    found, most, least = (0, 0), 0, float("inf")
    for rows, columns in PINPOINTS:
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = rows * columns - kept
        if kept > most or (kept == most and wasted < least):
            found, most, least = (rows, columns), kept, wasted
    return found


def count(height: int, width: int) -> int:
    """As the published processor counts."""
    rows, columns = (side // 14 for side in best(height, width))
    if width / height > columns / rows:
        rows -= (rows - int(height * columns) // width) // 2 * 2
    else:
        columns -= (columns - int(width * rows) // height) // 2 * 2
    return (columns + 1) * rows + 24 * 24


@pytest.mark.parametrize("size", [*SIZES[:-1], (700, 500), (333, 1001), (336, 336), (671, 401)])
def test_minimaxs_tiles(size: tuple[int, int], minimax: Any) -> None:
    image, (height, width) = picture(*size), size
    (own,) = minimax.process([item(image)], {})
    rows, columns = best(height, width)
    if width / height > columns / rows:
        fitted = columns, int(columns * height / width)
    else:
        fitted = int(rows * width / height), rows
    canvas = Image.new("RGB", (columns, rows))
    canvas.paste(image.resize(fitted), ((columns - fitted[0]) // 2, (rows - fitted[1]) // 2))
    pieces = [image.resize((336, 336))]
    pieces += [
        canvas.crop((x, y, x + 336, y + 336))
        for y in range(0, rows, 336)
        for x in range(0, columns, 336)
    ]
    plain = CLIPImageProcessor(do_resize=False, do_center_crop=False)
    made = plain(images=pieces, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(array(own, "pixel_values"), made, atol=1e-5, rtol=0)
    assert own.num_tokens == count(height, width)
    assert own.num_tokens <= minimax.largest("image", {}).num_tokens
    assert minimax.placeholder_ids == (200025,)


def test_what_minimax_refuses(minimax: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="2000 x 1 pixels: is too narrow"):
        minimax.process([item(picture(1, 2000))], {})
    config = {"vision_config": tower(336, 14)}
    (tmp_path / "preprocessor_config.json").write_text('{"process_image_mode": "resize"}')
    with pytest.raises(UnsupportedModel, match="process_image_mode = 'resize'"):
        processor_for(MINIMAX, config, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    sizes = processor_for(MINIMAX, config, tmp_path).sizes  # type: ignore[attr-defined]
    assert len(sizes) == 28
    assert sizes[-1] == (2016, 1008)
