"""Molmo's image processor, which is not in transformers: its numbers beside torch's resampling of tensors,
which the published code uses, and its places beside the picture that they must give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_image_processors import array, item, picture
from torch.nn import functional

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal import content_hash, processor_for
from headrace_multimodal.own_ways.molmo import tiling

TOKENS = {"<|endoftext|>": 5, "<im_start>": 100, "<im_end>": 101, "<im_patch>": 102, "<im_col>": 103,
          "<|image|>": 104}  # fmt: skip
BEGIN, END, PATCH, ROW, MARK = 100, 101, 102, 103, 104
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def folder(path: Path, **settings: Any) -> Path:
    tokens = {str(number): {"content": token} for token, number in TOKENS.items()}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    said = {"image_processor_type": "MolmoImageProcessor", **settings}
    (path / "preprocessor_config.json").write_text(json.dumps(said))
    return path


def made(path: Path, image: Any, **options: Any) -> ProcessedMedia:
    (own,) = processor_for("MolmoForCausalLM", {}, path).process([item(image)], options)
    return own


def canvas(image: Any, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The image in the middle [height, width, 3], normalised; and where it is."""
    x = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 255
    scale = min(
        np.float32(height) / np.float32(x.shape[2]), np.float32(width) / np.float32(x.shape[3])
    )
    size = [int(np.float32(x.shape[2]) * scale), int(np.float32(x.shape[3]) * scale)]
    x = functional.interpolate(x, size, mode="bilinear", antialias=True).clip(0, 1)
    down, across = height - size[0], width - size[1]
    around = (across // 2, across - across // 2, down // 2, down - down // 2)
    whole = functional.pad(x, around)[0].permute(1, 2, 0)
    mask = functional.pad(torch.ones(size), around)
    return (whole - torch.tensor(MEAN)) / torch.tensor(STD), mask


def squares(image: torch.Tensor, side: int) -> torch.Tensor:
    """[H, W, ...] -> [rows, columns, side, side, ...]."""
    return image.unfold(0, side, side).unfold(1, side, side).movedim((-2, -1), (2, 3))


@pytest.mark.parametrize(
    ("size", "grid"),
    [((700, 500), (3, 2)), ((336, 336), (1, 1)), ((211, 900), (1, 4)), ((64, 90), (1, 1)),
     ((31, 400), (1, 1))],
)  # fmt: skip
def test_numbers(size: tuple[int, int], grid: tuple[int, int], tmp_path: Path) -> None:
    """Read at its places, a picture's crops are the picture, row by row."""
    image = picture(*size)
    own = made(folder(tmp_path), image)
    values, places = array(own, "pixel_values").copy(), array(own, "places").copy()
    assert len(values) == grid[0] * grid[1] + 1
    small, _ = canvas(image, 336, 336)
    large, mask = canvas(image, 224 * grid[0] + 112, 224 * grid[1] + 112)
    crops = torch.from_numpy(values).view(-1, 12, 2, 12, 2, 14, 14, 3)
    crops = crops.permute(0, 1, 3, 2, 5, 4, 6, 7).reshape(-1, 28, 28, 3)[torch.from_numpy(places)]
    expected = torch.cat([squares(x, 28).flatten(0, 1) for x in (small, large)])
    torch.testing.assert_close(crops, expected, atol=1e-5, rtol=0)
    # A crop's share of image stands one place before it.
    masks = array(own, "image_masks")
    assert (masks[-1] == -1).all()
    first = squares(mask[:336, :336], 14).flatten(0, 1).mean((1, 2))
    np.testing.assert_allclose(masks[0], first, atol=1e-6)
    assert array(own, "patch_token").tolist() == [PATCH]


def test_tokens(tmp_path: Path) -> None:
    own = made(folder(tmp_path), picture(400, 600))
    row = [*[PATCH] * 12, ROW]
    wide = [*[PATCH] * 28, ROW]
    assert own.token_ids == (BEGIN, *row * 12, END, BEGIN, *wide * 20, END)
    assert sum(number for _, number in own.runs) == 144 + 20 * 28 == len(array(own, "places"))
    taken = [own.token_ids[start : start + number] for start, number in own.runs]
    assert {token for run in taken for token in run} == {PATCH}


def test_tilings_are_those_that_an_image_grows_least_for() -> None:
    assert tiling(224, 224, 224, 12) == (1, 1)
    assert tiling(225, 224, 224, 12) == (2, 1)
    assert tiling(3000, 3000, 224, 12) == (3, 3)
    assert tiling(3000, 2000, 224, 12) == (4, 3)
    assert tiling(-48, 20, 224, 12) == (1, 1)
    assert tiling(0, 500, 224, 12) == (1, 3)


@pytest.mark.parametrize(
    "prompt", [[5, 20, 21], [20, 21], [20, MARK, MARK, 21], [5, MARK, 20, 21, MARK]]
)
def test_images_stand_in_front(prompt: list[int], tmp_path: Path) -> None:
    processor = processor_for("MolmoForCausalLM", {}, folder(tmp_path, max_crops=1))
    media = processor.process([item(picture(40, 50)), item(picture(50, 40))], {})
    placed = processor.place(prompt, media)
    items = [token for own in media for token in own.token_ids]
    assert placed.token_ids == [5, *items, 20, 21]
    assert placed.offsets == [1, 1 + media[0].num_tokens]
    assert processor.place([20, 21], []).token_ids == [20, 21]
    with pytest.raises(RequestError, match="1 placeholders"):
        processor.place([MARK, 20], media)


def test_the_largest_has_most_tokens(tmp_path: Path) -> None:
    processor = processor_for("MolmoForCausalLM", {}, folder(tmp_path, max_crops=3))
    most = processor.largest("image", {}).num_tokens
    for size in ((1200, 400), (700, 700), (300, 900)):
        assert made(tmp_path, picture(*size)).num_tokens <= most
    assert processor.largest("image", {"num_tokens": 500}).num_tokens <= 500


def test_options(tmp_path: Path) -> None:
    path, image = folder(tmp_path), picture(700, 700)
    assert len(array(made(path, image, max_crops=4), "pixel_values")) == 5
    for value in (0, 13, "4", True):
        with pytest.raises(RequestError, match=f"max_crops = {value!r}"):
            made(path, image, max_crops=value)
    pixels = np.zeros((2000, 1, 3), np.uint8)
    narrow = MediaItem("image", pixels, content_hash("image", pixels), {})
    with pytest.raises(RequestError, match="1 x 2000 pixels") as caught:
        processor_for("MolmoForCausalLM", {}, path).process([narrow], {})
    assert caught.value.param == "multi_modal_data"


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"base_image_input_size": [336, 320]}, r"\[336, 320\]"), ({"overlap_margins": [3, 4]}, "margins"),
     ({"image_token_length_w": 13}, "image_token_length_w = 13"), ({"max_crops": 0}, "max_crops = 0"),
     ({"image_padding_mask": False}, "image_padding_mask")],
)  # fmt: skip
def test_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        processor_for("MolmoForCausalLM", {}, folder(tmp_path, **settings))
