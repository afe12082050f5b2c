"""Qwen-VL's image processor, which is in its published code: its numbers beside Pillow's, its tokens beside
what the code writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_image_processors import SIZES, array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal import processor_for

BEGIN, END, PAD = 90, 91, 92
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SMALL: dict[str, Any] = {"image_size": 28, "n_queries": 4}
WHOLE = [BEGIN, PAD, PAD, PAD, PAD, END]


def processor(**visual: Any) -> Any:
    config = {"visual": {"image_start_id": BEGIN, **visual}}
    return processor_for("QwenVLForConditionalGeneration", config, Path("/nowhere"))


def made(size: tuple[int, int]) -> ProcessedMedia:
    (own,) = processor(**SMALL).process([item(picture(*size))], {})
    found: ProcessedMedia = own
    return found


@pytest.mark.parametrize("size", [*SIZES, (3, 900), (28, 28)])
def test_numbers(size: tuple[int, int]) -> None:
    image = picture(*size).resize((28, 28), Image.Resampling.BICUBIC)
    expected = (np.asarray(image, np.float32) / 255 - MEAN) / STD
    own = array(made(size), "pixel_values")
    np.testing.assert_allclose(own, expected.transpose(2, 0, 1), atol=1e-5, rtol=0)


def test_what_the_config_leaves_out() -> None:
    (own,) = processor().process([item(picture(50, 70))], {})
    assert array(own, "pixel_values").shape == (3, 448, 448)
    assert own.num_tokens == 258
    assert own.runs == ((1, 256),)


@pytest.mark.parametrize("between", [[], [PAD] * 256, [5, 6, 7]])
def test_what_stands_between_the_marks_is_not_read(between: list[int]) -> None:
    """The published tokenizer fills up a path there."""
    own, mark = made((40, 30)), [BEGIN, *between, END]
    placed = processor(**SMALL).place([7, *mark, 8, *mark, 9], [own, own])
    assert list(placed.token_ids) == [7, *WHOLE, 8, *WHOLE, 9]
    assert list(placed.offsets) == [1, 8]


def test_images_are_counted() -> None:
    assert processor().placeholder("image", 1) == "Picture 2: <img></img>\n"


def test_text_alone() -> None:
    assert list(processor().place([7, 8, END], []).token_ids) == [7, 8, END]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([7], "one for each"),
        ([BEGIN, END, BEGIN, END], "one for each"),
        ([BEGIN, 7], "does not end"),
        ([BEGIN, BEGIN], "does not end"),
    ],
)
def test_other_marks_are_refused(tokens: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        processor(**SMALL).place(tokens, [made((40, 30))])


def test_vectors_alone() -> None:
    own = processor(**SMALL).embedded("image", 4, {})
    assert own.runs == ((1, 4),)
    assert not own.inputs


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="image_size = 'large'"):
        processor(image_size="large")
    with pytest.raises(RequestError, match="no such option"):
        processor(**SMALL).process([item(picture(9, 9))], {"crops": 2})
