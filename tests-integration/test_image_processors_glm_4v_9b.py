"""GLM-4V 9B's image processor, which is in its tokenizer's published code: its numbers beside torch's and
Pillow's, its tokens beside what the code writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from test_image_processors import SIZES, array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import ProcessedMedia
from headrace_multimodal import processor_for

NAME, BEGIN, PAD, END = "GLM4VForCausalLM", 90, 5, 91
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def processor(path: Path, **vision: Any) -> Any:
    tokens = {str(PAD): {"content": "<|endoftext|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    config = {"boi_token_id": BEGIN, "eoi_token_id": END, "vision_config": vision}
    return processor_for(NAME, config, path)


SMALL: dict[str, int] = {"image_size": 28, "patch_size": 7}


def made(path: Path, size: tuple[int, int]) -> ProcessedMedia:
    (own,) = processor(path, **SMALL).process([item(picture(*size))], {})
    found: ProcessedMedia = own
    return found


@pytest.mark.parametrize("size", [*SIZES, (3, 900), (28, 28)])
def test_numbers(size: tuple[int, int], tmp_path: Path) -> None:
    image = picture(*size).resize((28, 28), Image.Resampling.BICUBIC)
    expected = (np.asarray(image, np.float32) / 255 - MEAN) / STD
    own = array(made(tmp_path, size), "pixel_values")
    np.testing.assert_allclose(own, expected.transpose(2, 0, 1), atol=1e-5, rtol=0)


def test_what_the_config_leaves_out(tmp_path: Path) -> None:
    (own,) = processor(tmp_path).process([item(picture(50, 70))], {})
    assert array(own, "pixel_values").shape == (3, 1120, 1120)
    assert own.num_tokens == 1602


class TestPlaces:
    mark: ClassVar = [BEGIN, PAD, END]
    whole: ClassVar = [BEGIN, *[PAD] * 4, END]

    def test_three_tokens_become_an_image(self, tmp_path: Path) -> None:
        own = made(tmp_path, (40, 30))
        assert own.runs == ((0, 6),)
        placed = processor(tmp_path, **SMALL).place([7, PAD, *self.mark, 8, PAD], [own])
        assert list(placed.token_ids) == [7, PAD, *self.whole, 8, PAD]
        assert list(placed.offsets) == [2]

    def test_text_alone(self, tmp_path: Path) -> None:
        assert list(processor(tmp_path, **SMALL).place([7, PAD], []).token_ids) == [7, PAD]

    @pytest.mark.parametrize(
        "tokens", [[7, BEGIN, END], [BEGIN, PAD], [*mark, BEGIN], [*mark, *mark], [*mark, END], [7]]
    )
    def test_other_marks_are_refused(self, tokens: list[int], tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=r"mark in the prompt|one for each"):
            processor(tmp_path, **SMALL).place(tokens, [made(tmp_path, (40, 30))])

    def test_it_takes_one_image(self, tmp_path: Path) -> None:
        own = made(tmp_path, (40, 30))
        with pytest.raises(RequestError, match="comes with 2 images"):
            processor(tmp_path, **SMALL).place([*self.mark, *self.mark], [own, own])


def test_vectors_alone(tmp_path: Path) -> None:
    own = processor(tmp_path, **SMALL).embedded("image", 6, {})
    assert own.num_tokens == 6
    assert not own.inputs


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="image_size = 'large'"):
        processor(tmp_path, image_size="large")
    with pytest.raises(RequestError, match="no such option"):
        processor(tmp_path, **SMALL).process([item(picture(9, 9))], {"crops": 2})
