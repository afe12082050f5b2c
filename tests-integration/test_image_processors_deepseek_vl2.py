"""DeepSeek-VL2's image processor beside a plain reading of the published code; prompts with more images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from speech_checkpoints import save_tokenizer, token_ids
from test_image_processors import array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_engine.input_processing.media import MediaReader
from headrace_engine.input_processing.media_items import FileReading
from headrace_multimodal import content_hash, processor_for

NAME = "DeepseekVLV2ForCausalLM"
SIZES = [
    [384 * w, 384 * h]
    for w, h in [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (2, 3), (3, 2)]
]
CONFIG = {"vision_config": {"image_size": 384}, "candidate_resolutions": SIZES}


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path, ("<image>",))
    stated = {"patch_size": 14, "downsample_ratio": 2, "normalize": True, "image_mean": [0.5] * 3,
              "image_std": [0.5] * 3, "candidate_resolutions": SIZES}  # fmt: skip
    (tmp_path / "processor_config.json").write_text(json.dumps(stated))
    return processor_for(NAME, CONFIG, tmp_path)


def on_grey(image: Image.Image, width: int, height: int) -> np.ndarray[Any, Any]:
    whole = np.asarray(ImageOps.pad(image, (width, height), color=(127, 127, 127)))
    found: np.ndarray[Any, Any] = whole.transpose(2, 0, 1) / 127.5 - 1
    return found


def best(image: Image.Image) -> tuple[int, int]:
    """The published rule, as it reads."""
    found, most, least = (0, 0), 0, float("inf")
    for width, height in SIZES:
        scale = min(width / image.width, height / image.height)
        small = int(image.width * scale) * int(image.height * scale)
        kept = min(small, image.width * image.height)
        wasted = width * height - kept
        if kept > most or (kept == most and wasted < least):
            found, most, least = (width, height), kept, wasted
    return found


@pytest.mark.parametrize(
    ("size", "grid"),
    [((700, 500), (2, 2)), ((300, 1400), (1, 4)), ((384, 384), (1, 1)), ((100, 61), (1, 1)),
     ((760, 1100), (2, 3)), ((900, 380), (3, 1))],
)  # fmt: skip
def test_tiles(size: tuple[int, int], grid: tuple[int, int], processor: Any) -> None:
    image = picture(*size[::-1])
    (own,) = processor.process([item(image)], {})
    width, height = best(image)
    assert (width // 384, height // 384) == grid == tuple(array(own, "patches_grid").tolist())
    small, *tiles = array(own, "pixel_values")
    np.testing.assert_allclose(small, on_grey(image, 384, 384), atol=1e-5)
    whole = on_grey(image, width, height)
    expected = [whole[:, y : y + 384, x : x + 384] for y in range(0, height, 384)
                for x in range(0, width, 384)]  # fmt: skip
    np.testing.assert_allclose(tiles, expected, atol=1e-5)
    columns, rows = grid
    assert own.num_tokens == 14 * 15 + 1 + 14 * rows * (14 * columns + 1)


def test_the_number_of_images_matters(processor: Any, tmp_path: Path) -> None:
    """Of more than two, each is one tile; an item that is kept is not taken for one of other tiles."""
    files = FileReading(pixels=lambda given, _: np.asarray(given))
    reader = MediaReader(processor, content_hash, max_kept_bytes=1 << 30, files=files)
    image, tokens = np.asarray(picture(700, 500)), token_ids(tmp_path, "a<image>")
    in_tiles, alone = 14 * 15 + 1 + 28 * 29, 14 * 15 + 1 + 14 * 15
    hashes = set()
    for number, options, expected in (
        (2, None, in_tiles), (3, None, alone), (1, None, in_tiles), (3, {"cropping": True}, in_tiles),
        (1, {"cropping": False}, alone),
    ):  # fmt: skip
        made = reader.place(tokens * number, {"image": [image] * number}, options)
        assert [one.num_tokens for one in made.media] == [expected] * number
        hashes.add((made.media[0].content_hash, expected))
    assert len({name for name, _ in hashes}) == len(hashes)


def test_largest(processor: Any) -> None:
    assert processor.largest("image", {}).num_tokens == 14 * 15 + 1 + 42 * 29
    assert processor.embedded("image", 421, {}).num_tokens == 421


def test_what_is_refused(processor: Any, tmp_path: Path) -> None:
    for option, value in (("cropping", 1), ("max_crops", 10)):
        with pytest.raises(RequestError, match=f"mm_processor_kwargs.{option}"):
            processor.process([item(picture(9, 9))], {option: value})
    with pytest.raises(RequestError, match="3000 x 1 pixels: is too narrow"):
        processor.process([item(picture(1, 3000))], {})
    for change, named in (
        ({"candidate_resolutions": [[384, 384], [500, 384]]}, "must be a list of widths"),
        ({"candidate_resolutions": [[224, 224]]}, r"\[0\]\[0\] = 224: must be 384"),
        ({"downsample_ratio": 1}, "downsample_ratio = 1: must be 2"),
        ({"patch_size": 0}, "patch_size = 0"),
    ):
        (tmp_path / "processor_config.json").write_text(json.dumps(change))
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(NAME, CONFIG, tmp_path)
