"""Videos of InternVL as published: frames beside the library that transformers' class uses, prompts beside
the published formula, which writes ``Frame1: <image>`` and so on, line by line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_image_processors import array, item, picture
from test_image_processors_internvl_chat import CONFIG, PER_TILE, library, published
from test_image_processors_internvl_chat import tokenizer as without_videos
from test_video_processors import VALUES, clip, video
from tokenizers import AddedToken, Tokenizer

from headrace_core.errors import RequestError
from headrace_multimodal import processor_for

FRAMES = "Frame1: <image>\nFrame2: <image>\nFrame3: <image>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(without_videos().to_str())
    made.add_special_tokens([AddedToken("<|video_pad|>", normalized=False, special=True)])
    return made


@pytest.fixture
def processor(tokenizer: Tokenizer, tmp_path: Path) -> Any:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return processor_for("InternVLChatModel", CONFIG, tmp_path)


def test_numbers_are_the_librarys(processor: Any) -> None:
    frames = clip(3, 61, 37)
    (own,) = processor.process([video(frames)], {})
    made = [library(max_patches=1)(images=frame, return_tensors="np") for frame in frames]
    expected = np.concatenate([np.asarray(one["pixel_values"]) for one in made])
    np.testing.assert_allclose(array(own, VALUES), expected, atol=1e-5)


@pytest.mark.parametrize("mark", ["<video>", "<|video_pad|>"])
@pytest.mark.parametrize(
    "text", ["VIDEO\nthe", "<s>the: VIDEO of", "VIDEOVIDEO", "the <image>\nVIDEO in"]
)
def test_prompts_are_the_published_ones(
    text: str, mark: str, processor: Any, tokenizer: Tokenizer
) -> None:
    images = [item(picture(37, 61))] if "<image>" in text else []
    videos = [video(clip(3, 40, 40))] * text.count("VIDEO")
    media = processor.process([*images, *videos], {})
    tiles = [array(one, "pixel_values").shape[0] for one in media[: len(images)]]
    expected = published(text.replace("VIDEO", FRAMES), tiles + [1] * 3 * len(videos))
    placed = processor.place(tokenizer.encode(text.replace("VIDEO", mark)).ids, media)
    assert placed.token_ids == expected
    context = tokenizer.token_to_id("<IMG_CONTEXT>")
    vectors = {
        offset + first + at
        for one, offset in zip(media, placed.offsets, strict=True)
        for first, number in one.runs
        for at in range(number)
    }
    assert vectors == {at for at, token in enumerate(expected) if token == context}


def test_as_many_as_are_marked(processor: Any, tokenizer: Tokenizer) -> None:
    media = processor.process([video(clip(2, 40, 40))], {})
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place(tokenizer.encode("the of").ids, media)
    largest = processor.largest("video", {"num_frames": 8, "num_tokens": 5 * PER_TILE})
    assert array(largest, VALUES).shape == (5, 3, 56, 56)


def test_models_whose_tokenizer_has_no_token_take_images(tmp_path: Path) -> None:
    without_videos().save(str(tmp_path / "tokenizer.json"))
    config: Mapping[str, Any] = CONFIG
    assert processor_for("InternVLChatModel", config, tmp_path).modalities() == ("image",)
