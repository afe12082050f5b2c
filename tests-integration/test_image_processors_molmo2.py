"""Molmo 2's image and video processors beside the library's: tokens, places and numbers.

The library's take torchvision, which is not installed: its resampling is torch's, which is called here as
torchvision calls it, and its normalization is written here; everything else is its own code.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kin_checkpoints import MOLMO2_MARKS, save_molmo2
from speech_checkpoints import token_ids
from test_image_processors import array, item, picture
from torch import Tensor
from torch.nn import functional

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for

MOLMO2 = "Molmo2ForConditionalGeneration"
SIZES = ((700, 500), (378, 378), (211, 900), (64, 90), (31, 400), (112, 113))
SETTINGS = {
    "size": {"height": 378, "width": 378}, "max_crops": 8, "overlap_margins": [4, 4], "patch_size": 14,
    "pooling_size": [2, 2],
}  # fmt: skip


@cache
def library(name: str) -> Any:
    """A module of transformers that imports torchvision at its top."""
    importlib.import_module("transformers.image_processing_backends")  # looks for torchvision
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    missing = [one for one in names if one not in sys.modules]
    for one in missing:
        sys.modules[one] = types.ModuleType(one)
    sys.modules[names[2]].functional = SimpleNamespace()  # type: ignore[attr-defined]
    try:
        return importlib.import_module(f"transformers.models.molmo2.{name}_molmo2")
    finally:
        for one in missing:
            del sys.modules[one]


class Backend:
    """What torchvision does for the library."""

    @staticmethod
    def resize(image: Tensor, size: Any, **_: Any) -> Tensor:
        wanted = [size.height, size.width]
        return functional.interpolate(image, wanted, mode="bilinear", align_corners=False)

    @staticmethod
    def rescale_and_normalize(
        image: Tensor, _: bool, factor: float, __: bool, mean: Any, std: Any
    ) -> Tensor:
        means, stds = (torch.tensor(x).view(-1, 1, 1) for x in (mean, std))
        return (image.float() * factor - means) / stds


NUMBERS = {
    "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def of_image(image: Any, **settings: Any) -> tuple[list[int], Tensor, Tensor]:
    """Grid, crops' patches and squares of an image."""
    kind, stated = library("image_processing").Molmo2ImageProcessor, {**SETTINGS, **settings}
    whole = type("Whole", (Backend, kind), {"__init__": lambda self: None})()
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].contiguous()
    grid, patches, squares = whole._image_batch_to_patches_and_grids(
        pixels, stated["max_crops"], stated["overlap_margins"], stated["size"]["height"],
        image_patch_size=stated["patch_size"], image_pooling_h=stated["pooling_size"][0],
        image_pooling_w=stated["pooling_size"][1], **NUMBERS,
    )  # fmt: skip
    return grid[0].tolist(), patches[0], squares[0]


def words(**flags: Any) -> Any:
    kind = library("processing").Molmo2Processor
    stated = {
        "image_use_col_tokens": True, "use_single_crop_col_tokens": None, "use_single_crop_start_token": True,
        "video_use_col_tokens": False, "use_frame_special_tokens": True, **flags,
    }  # fmt: skip
    made = kind.__new__(kind)
    for name, value in stated.items():
        setattr(made, name, value)
    return made


def close(own: Any, expected: Any) -> None:
    """Resampling adds in another order: one number of five thousand may be a byte's step away."""
    away = np.abs(np.asarray(own) - np.asarray(expected))
    assert away.max() < 2 / 255 / 0.5 * 0.51
    assert (away > 1e-5).mean() < 2e-4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_molmo2(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    of_videos = {"size": SETTINGS["size"], "patch_size": 14, "pooling_size": [3, 3], "max_fps": 2}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    return tmp_path


def made(folder: Path, image: Any, **options: Any) -> Any:
    (own,) = processor_for(MOLMO2, {}, folder).process([item(image)], options)
    return own


@pytest.mark.parametrize("size", SIZES)
def test_images(size: tuple[int, int], folder: Path) -> None:
    image = picture(*size)
    own = made(folder, image)
    grid, patches, squares = of_image(image)
    close(array(own, "pixel_values"), patches)
    np.testing.assert_array_equal(array(own, "squares"), squares)
    text = words().replace_image_token({"image_grids": [grid]}, 0)
    assert list(own.token_ids) == token_ids(folder, text)
    assert sum(number for _, number in own.runs) == len(squares)
    [patch] = token_ids(folder, "<im_patch>")
    assert {own.token_ids[at + i] for at, number in own.runs for i in range(number)} == {patch}
    assert own.num_tokens <= processor_for(MOLMO2, {}, folder).largest("image", {}).num_tokens


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"pooling_size": [3, 2]}, {"image_use_col_tokens": False}),
        ({"overlap_margins": [2, 5]}, {"use_single_crop_col_tokens": False}),
        ({"max_crops": 3}, {"use_single_crop_start_token": False}),
    ],
)
def test_other_settings(settings: Any, flags: Any, folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    (folder / "processor_config.json").write_text(json.dumps(flags))
    image = picture(500, 700)
    own = made(folder, image)
    grid, patches, squares = of_image(image, **settings)
    close(array(own, "pixel_values"), patches)
    np.testing.assert_array_equal(array(own, "squares"), squares)
    text = words(**flags).replace_image_token({"image_grids": [grid]}, 0)
    assert list(own.token_ids) == token_ids(folder, text)


def test_an_option_makes_fewer_crops(folder: Path) -> None:
    image = picture(700, 500)
    assert list(made(folder, image, max_crops=2).token_ids) == token_ids(
        folder, words().replace_image_token({"image_grids": [of_image(image, max_crops=2)[0]]}, 0)
    )
    with pytest.raises(RequestError, match="max_crops = 9: must be a number of crops from 1 to 8"):
        made(folder, image, max_crops=9)


@pytest.mark.parametrize(
    "flags", [{}, {"video_use_col_tokens": True, "use_frame_special_tokens": False}]
)
def test_videos(flags: Any, folder: Path) -> None:
    """One text with what stands in front; the times are not of what sees each other."""
    (folder / "processor_config.json").write_text(json.dumps(flags))
    frames = np.stack(
        [np.asarray(picture(90, 61)), np.asarray(picture(90, 61)).T.reshape(90, 61, 3)] * 2
    )
    processor = processor_for(MOLMO2, {}, folder)
    told = {"fps": 24.0, "frames_indices": [0, 30, 60, 93]}
    (own,) = processor.process([MediaItem("video", frames, "", told)], {})
    kind = library("video_processing").Molmo2VideoProcessor
    whole = type("Whole", (Backend, kind), {"__init__": lambda self: None})()
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    grid, patches, squares = whole._build_video_patches(
        pixels, 378, image_patch_size=14, image_pooling_h=3, image_pooling_w=3, **NUMBERS
    )
    close(array(own, "pixel_values_videos"), patches)
    every = torch.stack([torch.where(squares < 0, -1, squares + i * 27**2) for i in range(4)])
    np.testing.assert_array_equal(array(own, "squares"), every.flatten(0, 1))
    times = [index / 24.0 for index in told["frames_indices"]]
    text = words(**flags).get_video_string(torch.tensor([4, *grid]), times)
    placed = processor.place(token_ids(folder, "the water <|video|> runs"), [own])
    first = token_ids(folder, "<|endoftext|>")
    assert placed.token_ids == [*first, *token_ids(folder, f"the water {text} runs")]
    marks = set(token_ids(folder, "".join(MOLMO2_MARKS)))
    [bounds] = placed.whole_spans
    seen = [
        i for begin, end in zip(bounds[::2], bounds[1::2], strict=True) for i in range(begin, end)
    ]
    assert seen == [i for i, token in enumerate(placed.token_ids) if token in marks]
    assert len(bounds) == 8
    assert processor.largest("video", {"num_tokens": 1000}).num_tokens <= 1000
    (bare,) = processor.process([MediaItem("video", frames, "", {})], {})
    text = words(**flags).get_video_string(torch.tensor([4, *grid]), [0, 0.5, 1, 1.5])
    placed = processor.place(token_ids(folder, "<|video|>"), [bare])
    assert placed.token_ids == [*first, *token_ids(folder, text)]


def test_prompts(folder: Path) -> None:
    processor = processor_for(MOLMO2, {}, folder)
    media = processor.process([item(picture(40, 40)), item(picture(400, 40))], {})
    first, run = token_ids(folder, "<|endoftext|>"), [list(one.token_ids) for one in media]
    for begun in (False, True):
        ids = token_ids(folder, ("<|endoftext|>" if begun else "") + "a<|image|>b<|image|>c")
        a, b, c = token_ids(folder, "abc")
        placed = processor.place(ids, media)
        assert placed.token_ids == [*first, a, *run[0], b, *run[1], c]
        assert list(placed.offsets) == [2, 3 + len(run[0])]
        [bounds] = placed.whole_spans
        assert bounds == (2, 2 + len(run[0]), 3 + len(run[0]), 3 + len(run[0]) + len(run[1]))
    film = MediaItem("video", np.zeros((2, 8, 8, 3), np.uint8), "", {})
    both = [*media[:1], *processor.process([film], {})]
    with pytest.raises(RequestError, match="2 items with a video among them"):
        processor.place(token_ids(folder, "<|image|><|video|>"), both)
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place(token_ids(folder, "<|image|>"), media)
    facts = {"image_sizes": [400, 40]}
    assert processor.embedded("image", 1, facts).runs == media[1].runs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 378, "width": 364}}, "size = 378 x 364"),
        ({"overlap_margins": [20, 7]}, r"overlap_margins = \[20, 7\]"),
        ({"pooling_size": [0, 2]}, r"pooling_size = \[0, 2\]"),
        ({"resample": 3}, "resample = 3"),
        ({"max_crops": 0}, "max_crops = 0"),
    ],
)
def test_what_is_refused(settings: Any, message: str, folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    with pytest.raises(UnsupportedModel, match=message):
        processor_for(MOLMO2, {}, folder)
