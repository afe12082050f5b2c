"""Pixtral's images for Mistral's own files, beside a plain reading of what mistral-common makes: cubic
resampling by torch in double precision, and its rows of tokens. (By hand: tokens equal those of
mistral-common 1.13 for images of 16 to 2000 pixels of a side, numbers are within 1e-5 of OpenCV's.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_image_processors import array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

NAME = "PixtralForConditionalGeneration"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def config(side: int = 64, merge: int | None = None, patch: int = 8) -> dict[str, Any]:
    return {
        "image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13,
        "vision_config": {"patch_size": patch, "image_size": side}, "spatial_merge_size": merge,
    }  # fmt: skip


def published(image: Image.Image, side: int, unit: int) -> tuple[list[int], torch.Tensor]:
    """Tokens and numbers of an image.

    Args:
        side: the longest.
        unit: pixels of a vector, along a side.
    """
    width, height = image.size
    ratio = max(height / side, width / side)
    if ratio > 1:
        width, height = round(width / ratio), round(height / ratio)
    columns, rows = (width - 1) // unit + 1, (height - 1) // unit + 1
    tokens = ([10] * columns + [12]) * rows
    tokens[-1] = 13
    pixels = torch.tensor(np.asarray(image)).double().permute(2, 0, 1)[None]
    size = (rows * unit, columns * unit)
    made = torch.nn.functional.interpolate(pixels, size, mode="bicubic", align_corners=False)[0]
    mean, std = (torch.tensor(x).double()[:, None, None] for x in (MEAN, STD))
    return tokens, (made / 255 - mean) / std


@pytest.mark.parametrize("size", [(37, 61), (64, 64), (90, 31), (300, 211), (16, 500), (8, 8)])
@pytest.mark.parametrize(("side", "merge"), [(64, None), (64, 2), (1024, None), (280, 2)])
def test_numbers_and_tokens(
    size: tuple[int, int], side: int, merge: int | None, tmp_path: Path
) -> None:
    image = picture(*size)
    (own,) = processor_for(NAME, config(side, merge), tmp_path).process([item(image)], {})
    tokens, numbers = published(image, side, 8 * (merge or 1))
    assert list(own.token_ids) == tokens
    found = torch.tensor(array(own, "pixel_values"))
    torch.testing.assert_close(found.double(), numbers, atol=1e-5, rtol=0)
    taken = [first + at for first, number in own.runs for at in range(number)]
    assert taken == [at for at, token in enumerate(tokens) if token == 10]


def test_prompts(tmp_path: Path) -> None:
    """What stands beside the files for transformers' classes is not looked at."""
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"longest_edge": 16}}')
    processor = processor_for(NAME, config(), tmp_path)
    media = processor.process([item(picture(9, 16)), item(picture(8, 24))], {})
    placed = processor.place([3, 10, 5, 10, 4], media)
    first, second = [10, 10, 12, 10, 10, 13], [10, 10, 10, 13]
    assert placed.token_ids == [3, *first, 5, *second, 4]
    assert placed.offsets == [1, 8]
    assert processor.placeholder("image", 0) == "[IMG]"
    assert processor.largest("image", {}).num_tokens == 8 * 9
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place([3, 4], media)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (config(side=0), "max_image_size = 0"),
        (config(patch=0), "patch_size = 0"),
        ({**config(), "image_end_token_id": "x"}, "image_end_token_id must be a token id"),
    ],
)
def test_refused(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        processor_for(NAME, changed, tmp_path)
