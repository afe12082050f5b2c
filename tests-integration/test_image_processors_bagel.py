"""Images of Bagel beside the published pipeline: Pillow's bicubic filter twice, patches row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kin_checkpoints import save_bagel
from PIL import Image
from speech_checkpoints import token_ids
from test_image_processors import array, item, picture

from headrace_core.errors import RequestError
from headrace_multimodal import processor_for

BAGEL = "BagelForConditionalGeneration"
CONFIG: dict[str, Any] = {"vit_config": {"image_size": 980, "patch_size": 14}}
SIZES = ((37, 61), (256, 256), (700, 500), (31, 400), (1500, 300), (90, 1440), (1000, 1010))


def once(image: Any, most: int, least: int, step: int) -> Any:
    """As the published code resizes: the long side's bound, then the short side's, then the area's, which
    is taken for one of sides, then the long side's again."""
    most_pixels = 14 * 14 * 9 * 1024

    def scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
        a, b = (round(side * scale) for side in size)
        return max(step, int(round(a / step) * step)), max(step, int(round(b / step) * step))

    scale = max(min(most / max(image.size), 1.0), least / min(image.size))
    size = scaled(image.size, scale)
    if size[0] * size[1] > most_pixels:
        size = scaled(size, most_pixels / (size[0] * size[1]))
    if max(size) > most:
        size = scaled(size, most / max(size))
    return image.resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_bagel(tmp_path)
    return tmp_path


@pytest.mark.parametrize("size", SIZES)
def test_images(size: tuple[int, int], folder: Path) -> None:
    image = picture(*size)
    processor = processor_for(BAGEL, CONFIG, folder)
    (own,) = processor.process([item(image)], {})
    x = np.asarray(once(once(image, 1024, 512, 16), 980, 224, 14), np.float32)
    x = (x / 255 - 0.5) / 0.5
    rows, columns = x.shape[0] // 14, x.shape[1] // 14
    expected = [
        x[14 * y : 14 * (y + 1), 14 * z : 14 * (z + 1)].ravel()
        for y in range(rows)
        for z in range(columns)
    ]
    np.testing.assert_allclose(array(own, "pixel_values"), expected, atol=1e-6, rtol=0)
    assert array(own, "image_grid").tolist() == [rows, columns]
    assert own.num_tokens == rows * columns + 2
    assert own.num_tokens <= processor.largest("image", {}).num_tokens == 70 * 70 + 2


def test_too_long(folder: Path) -> None:
    processor = processor_for(BAGEL, CONFIG, folder)
    with pytest.raises(RequestError, match="200 times"):
        processor.process([item(picture(1, 201))], {})


@pytest.mark.parametrize("around", [("", ""), ("<|vision_start|>", "<|vision_end|>")])
def test_prompts(around: tuple[str, str], folder: Path) -> None:
    processor = processor_for(BAGEL, CONFIG, folder)
    begin, mark, end = token_ids(folder, "<|vision_start|><|image_pad|><|vision_end|>")
    media = processor.process([item(picture(64, 300)), item(picture(64, 64))], {})
    a, b = token_ids(folder, "ab")
    written = f"{around[0]}<|image_pad|>{around[1]}"
    placed = processor.place(token_ids(folder, f"a{written}b{written}"), media)
    runs = [[begin, *[mark] * (one.num_tokens - 2), end] for one in media]
    assert placed.token_ids == [a, *runs[0], b, *runs[1]]
    ends = [1, 1 + len(runs[0]), 2 + len(runs[0]), len(placed.token_ids)]
    assert list(placed.whole_spans) == [(ends[0], ends[1]), (ends[2], ends[3])]
    assert processor.embedded("image", 6, {}).token_ids == (begin, *[mark] * 6, end)
