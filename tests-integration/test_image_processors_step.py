"""Images of Step3-VL 10B and Step 3 beside a plain reading of the published code, which takes torchvision:
its resizing of tensors is torch's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kin_checkpoints import save_step3_vl
from PIL import Image
from speech_checkpoints import token_ids
from test_image_processors import array, item, picture
from torch.nn import functional

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for
from headrace_multimodal.tiles.step import Cutting

STEP3, STEP_VL = "Step3VLForConditionalGeneration", "StepVLForConditionalGeneration"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = (
    (700, 500), (728, 728), (211, 900), (900, 150), (64, 90), (20, 100), (20, 60), (1100, 1500), (500, 300),
    (3100, 900), (760, 510),
)  # fmt: skip


def numbers(image: Any, side: int) -> torch.Tensor:
    x = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div(255)
    x = (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return functional.interpolate(x[None], (side, side), mode="bilinear", antialias=True)[0]


def cut(image: Any) -> tuple[Any, list[Any], int]:
    """The whole, its crops, and how many a row has."""
    width, height = image.size
    if min(width, height) < 32 and not 1 / 4 <= width / height <= 4:
        square = Image.new("RGB", (max(width, height),) * 2, 0)
        square.paste(image, (0, 0))
        image, (width, height) = square, square.size
    if max(width, height) > 3024:
        scale = 3024 / max(width, height)
        width, height = int(width * scale), int(height * scale)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    long, short = max(width, height), min(width, height)
    if long <= 728:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, 504) if long / short > 4 else 504
    if not window:
        return image, [], 0

    def snapped(side: int) -> int:
        ratio = side / window
        if ratio < 1:
            return side
        return window * (int(ratio) + (ratio - side // window > 0.2))

    wide, tall = snapped(width), snapped(height)
    image_for_crop = image.resize((wide, tall), Image.Resampling.BILINEAR)
    columns, rows = (max(1, math.ceil(side / window)) for side in (wide, tall))
    tiles = [
        image_for_crop.crop((x * window, y * window, (x + 1) * window, (y + 1) * window))
        for y in range(rows)
        for x in range(columns)
    ]
    return image, tiles, columns


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_step3_vl(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    return tmp_path


@pytest.mark.parametrize("size", SIZES)
def test_images(size: tuple[int, int], folder: Path) -> None:
    [mark] = token_ids(folder, "<im_patch>")
    image = picture(*size)
    whole, tiles, columns = cut(image)
    stride = {"understand_projector_stride": 2}
    for name, config in ((STEP_VL, {}), (STEP3, stride)):
        processor = processor_for(name, {"image_token_id": mark, **config}, folder)
        (own,) = processor.process([item(image)], {})
        np.testing.assert_allclose(
            array(own, "pixel_values"), numbers(whole, 728), atol=1e-5, rtol=0
        )
        assert ("tiles" in own.inputs) == bool(tiles)
        if tiles:
            expected = torch.stack([numbers(tile, 504) for tile in tiles])
            np.testing.assert_allclose(array(own, "tiles"), expected, atol=1e-5, rtol=0)
        text = ""
        for index in range(len(tiles)):
            text += "<patch_start>" + "<im_patch>" * 81 + "<patch_end>"
            if (index + 1) % columns == 0 and index + 1 < len(tiles):
                text += "<patch_newline>"
        text += "<im_start>" + "<im_patch>" * 169 + "<im_end>"
        assert list(own.token_ids) == token_ids(folder, text)
        assert sum(number for _, number in own.runs) == 81 * len(tiles) + 169


def test_the_largest(folder: Path) -> None:
    """No image takes more tokens than the tallest that is cut into small crops."""
    [mark] = token_ids(folder, "<im_patch>")
    processor = processor_for(STEP_VL, {"image_token_id": mark}, folder)
    tallest, narrow = processor.largest_size()  # type: ignore[attr-defined]
    assert Cutting(728, 504, 3024).step(tallest, narrow) == 32
    largest = processor.largest("image", {})
    assert largest.num_tokens == 95 * 83 + 94 + 171
    assert processor.largest("image", {"num_tokens": 1000}).num_tokens <= 1000
    assert processor.embedded("image", 1, {"image_sizes": [700, 500]}).num_tokens == 171


def test_what_is_refused(folder: Path) -> None:
    [mark] = token_ids(folder, "<im_patch>")
    config = {"image_token_id": mark}
    with pytest.raises(RequestError, match="no such option"):
        processor_for(STEP_VL, config, folder).process([item(picture(9, 9))], {"max_crops": 3})
    with pytest.raises(UnsupportedModel, match="understand_projector_stride = 0"):
        processor_for(STEP3, {**config, "understand_projector_stride": 0}, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": 504}))
    with pytest.raises(UnsupportedModel, match="size = 504: must be 728 x 728"):
        processor_for(STEP_VL, config, folder)
