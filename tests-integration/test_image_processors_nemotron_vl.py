"""The processors of Llama 3.1 Nemotron Nano VL and Nemotron Nano V2 VL beside plain readings of what is
published; texts around frames beside the library's of the next model, without its joined frames."""

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
from test_video_processors import VALUES, clip, of_file, video

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


def tiles_of(image: Any, columns: int, rows: int) -> np.ndarray[Any, Any]:
    """In numbers from 0 to 1."""
    large = image.resize((columns * SIDE, rows * SIDE), Image.Resampling.BICUBIC)
    tiles = [
        large.crop((c * SIDE, r * SIDE, (c + 1) * SIDE, (r + 1) * SIDE))
        for r in range(rows)
        for c in range(columns)
    ]
    if len(tiles) > 1:
        tiles.append(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    found: np.ndarray[Any, Any] = np.stack([np.asarray(x).transpose(2, 0, 1) for x in tiles])
    return found.astype(np.float32) / 255


OF_IMAGES = pytest.mark.parametrize(
    "size", [(37, 61), (64, 64), (90, 31), (300, 211), (20, 20), (61, 122)]
)


@OF_IMAGES
def test_numbers_and_tokens(size: tuple[int, int], processor: Any, tmp_path: Path) -> None:
    image = picture(*size)
    expected = tiles_of(image, *published(image.width, image.height, SIDE, 12))
    (own,) = processor.process([item(image)], {})
    np.testing.assert_allclose(array(own, "pixel_values"), expected, atol=1e-5)
    inner = "<image>" * PER_TILE * len(expected)
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


def of_internvl(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """The rule of InternVL, which the second model's published code has: of several grids that are nearest
    the last that is not twice as large."""
    ratios = sorted(
        ((c, r) for c in range(1, most + 1) for r in range(1, most // c + 1)),
        key=lambda ratio: ratio[0] * ratio[1],
    )
    best, nearest = (1, 1), float("inf")
    for columns, rows in ratios:
        away = abs(width / height - columns / rows)
        if away < nearest or (
            away == nearest and width * height > 0.5 * side * side * columns * rows
        ):
            best, nearest = (columns, rows), away
    return best


@OF_IMAGES
def test_the_second_model(size: tuple[int, int], processor: Any, tmp_path: Path) -> None:
    mean, std = [0.48, 0.45, 0.4], [0.26, 0.27, 0.28]
    stated = {"norm_mean": mean, "max_num_tiles": 9, "image_size": SIDE}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    second = processor_for("NemotronH_Nano_VL_V2", {**CONFIG, "norm_std": std}, tmp_path)
    image = picture(*size)
    expected = tiles_of(image, *of_internvl(image.width, image.height, SIDE, 9))
    normed = (expected - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    (own,) = second.process([item(image)], {})
    np.testing.assert_allclose(array(own, "pixel_values"), normed, atol=1e-5)
    inner = "<image>" * PER_TILE * len(expected)
    placed = second.place(token_ids(tmp_path, "the <image>\nwater"), [own])
    assert placed.token_ids == token_ids(tmp_path, f"the <img>{inner}</img>\nwater")
    assert second.largest("image", {}).num_tokens == 10 * PER_TILE + 2 >= own.num_tokens
    with pytest.raises(UnsupportedModel, match="norm_std = None"):
        processor_for("NemotronH_Nano_VL_V2", CONFIG, tmp_path)


@pytest.mark.parametrize("known", [{"fps": 3.0}, of_file(3), {}])
def test_videos_of_the_second_model(known: dict[str, Any], processor: Any, tmp_path: Path) -> None:
    from transformers.models.nemotron_h_omni import processing_nemotron_h_omni as library
    from transformers.video_utils import VideoMetadata

    halves = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3}
    second = processor_for("NemotronH_Nano_VL_V2", {**CONFIG, **halves}, tmp_path)
    assert second.modalities() == ("image", "video")
    frames = clip(3, 61, 37)
    (own,) = second.process([video(frames, **known)], {})
    small = [Image.fromarray(x).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for x in frames]
    expected = np.stack([np.asarray(x).transpose(2, 0, 1) for x in small]) / 127.5 - 1
    np.testing.assert_allclose(array(own, VALUES), expected, atol=1e-5)
    theirs = library.NemotronH_Omni_Reasoning_V3Processor.__new__(
        library.NemotronH_Omni_Reasoning_V3Processor
    )
    theirs.image_start_token, theirs.image_end_token = "<img>", "</img>"
    theirs.image_token, theirs.video_temporal_patch_dim = "<image>", 1
    metadata = VideoMetadata(
        total_num_frames=40, fps=known.get("fps"), frames_indices=known.get("frames_indices")
    )
    written = theirs.replace_video_token(
        {"num_tokens": [PER_TILE]}, 0, num_frames=3, video_metadata=metadata
    )
    text = "the FILM\nwater: <image>"
    media = [*second.process([item(picture(9, 9))], {}), own]
    placed = second.place(token_ids(tmp_path, text.replace("FILM", "<video>")), media)
    picture_text = f"<img>{'<image>' * PER_TILE}</img>"
    whole = text.replace("<image>", picture_text).replace("FILM", written)
    assert placed.token_ids == token_ids(tmp_path, whole)
    assert second.largest("video", {"num_frames": 9, "num_tokens": 7 * PER_TILE}).num_tokens < 400
