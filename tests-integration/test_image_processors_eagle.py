"""Eagle 2.5's processor beside a plain reading of what is published: tiles, numbers, prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from PIL import Image
from test_image_processors import array, item, picture
from test_image_processors_internvl_chat import tokenizer as made_tokenizer
from test_video_processors import VALUES, clip, video
from tokenizers import Tokenizer

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for
from headrace_multimodal.tiles.nemotron_vl import grid_of

NAME = "Eagle2_5_VLForConditionalGeneration"
SIDE, PER_TILE = 32, 4
SIDES = st.integers(1, 2000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of bytes; merges reach over the edges of the text in front of an image."""
    return made_tokenizer()


@pytest.fixture
def config(tokenizer: Tokenizer, tmp_path: Path) -> dict[str, Any]:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return {
        "vision_config": {"image_size": SIDE, "patch_size": 8}, "downsample_ratio": 0.5,
        "image_token_index": tokenizer.token_to_id("<IMG_CONTEXT>"),
    }  # fmt: skip


def published(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The published rule: the first grid that has the highest factor."""
    ratios = {
        (i, j)
        for n in range(least, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if least <= i * j <= most
    }
    best, factor = (1, 1), float("-inf")
    for columns, rows in sorted(ratios, key=lambda ratio: ratio[0] * ratio[1]):
        target, own = columns / rows, width / height
        size = min((columns * rows * side * side) / (width * height), 0.6)
        found = size * min(target / own, own / target)
        if found > factor:
            best, factor = (columns, rows), found
    return best


@given(SIDES, SIDES, st.integers(1, 4), st.integers(4, 12))
@examples(max_examples=100, deadline=None)
def test_grids(height: int, width: int, least: int, most: int) -> None:
    expected = published(width, height, 448, least, most)
    assert grid_of((height, width), 448, most, least) == expected


@pytest.mark.parametrize("size", [(37, 61), (64, 64), (90, 31), (300, 211), (20, 20)])
def test_numbers(size: tuple[int, int], config: dict[str, Any], tmp_path: Path) -> None:
    stated = {"size": {"height": SIDE, "width": SIDE}, "max_dynamic_tiles": 9, "crop_size": None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    processor = processor_for(NAME, config, tmp_path)
    image = picture(*size)
    columns, rows = published(image.width, image.height, SIDE, 1, 9)
    large = image.resize((columns * SIDE, rows * SIDE), Image.Resampling.BICUBIC)
    tiles = [
        large.crop((c * SIDE, r * SIDE, (c + 1) * SIDE, (r + 1) * SIDE))
        for r in range(rows)
        for c in range(columns)
    ]
    if len(tiles) > 1:
        tiles.append(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    expected = np.stack([np.asarray(x).transpose(2, 0, 1) for x in tiles]).astype(np.float32)
    (own,) = processor.process([item(image)], {})
    np.testing.assert_allclose(array(own, "pixel_values"), expected / 127.5 - 1, atol=1e-5)
    assert own.runs == ((1, PER_TILE * len(tiles)),)
    (one,) = processor.process([item(image)], {"max_dynamic_tiles": 1})
    assert array(one, "pixel_values").shape == (1, 3, SIDE, SIDE)
    (many,) = processor.process([item(image)], {"min_dynamic_tiles": 4})
    assert len(array(many, "pixel_values")) >= 5
    assert processor.largest("image", {}).num_tokens == 10 * PER_TILE + 2 >= own.num_tokens


@pytest.mark.parametrize(
    "text",
    [
        "<image-1>\nthe of",
        "<s>the <image-1> of <image-2>>< in",
        "in<image-2><image-1>the",
        "the < of: <image-1",
    ],
)
def test_prompts_are_the_published_ones(
    text: str, config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    processor = processor_for(NAME, config, tmp_path)
    count = len(re.findall("<image-[0-9]>", text))
    media = processor.process([item(picture(30, 40)), item(picture(50, 20))][:count], {})
    tiles = [len(array(own, "pixel_values")) for own in media]

    def written(match: re.Match[str]) -> str:
        vectors = "<IMG_CONTEXT>" * PER_TILE * tiles[int(match[1]) - 1]
        return f"<image {match[1]}><img>{vectors}</img>"

    ids = tokenizer.encode(re.sub("<image-([0-9])>", written, text)).ids
    placed = processor.place(tokenizer.encode(text).ids, media)
    assert placed.token_ids == ids
    for own, offset in zip(media, placed.offsets, strict=True):
        assert ids[offset : offset + own.num_tokens] == list(own.token_ids)
    assert [processor.placeholder("image", index) for index in (0, 1)] == ["<image-1>", "<image-2>"]
    if count == 1:
        token = text.replace("<image-1>", "<IMG_CONTEXT>")
        assert processor.place(tokenizer.encode(token).ids, media) == placed
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place(tokenizer.encode(text + "<image-1><image-1>").ids, media or [None])


def test_videos(config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Frames of a file, and frames of which nothing is known; by numbers, images among them."""
    processor = processor_for(NAME, config, tmp_path)
    frames = clip(3, 61, 37)
    known = {"fps": 8.0, "total_num_frames": 20, "frames_indices": [0, 9, 19]}
    items = [video(frames), item(picture(30, 40)), video(frames, **known)]
    media = processor.process(items, {"max_dynamic_tiles": 1})
    small = [Image.fromarray(x).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for x in frames]
    expected = np.stack([np.asarray(x).transpose(2, 0, 1) for x in small]) / 127.5 - 1
    np.testing.assert_allclose(array(media[0], VALUES), expected, atol=1e-5)
    tile = f"<img>{'<IMG_CONTEXT>' * PER_TILE}</img>"
    times = ("0.00", "1.12", "2.38")
    written = {
        "<video-1>": "The first video: " + "".join(f"Frame {n}: {tile}" for n in (1, 2, 3)),
        "<video-2>": "The second video sampled with 1.20 fps: "
        + "".join(f"Frame {n} sample at {at}s: {tile}" for n, at in enumerate(times, 1)),
        "<image-1>": f"<image 1>{tile}",
    }
    text = whole = "<s>the <video-2>in <image-1> of<video-1>\nthe"
    for mark, words in written.items():
        whole = whole.replace(mark, words)
    placed = processor.place(tokenizer.encode(text).ids, media)
    assert placed.token_ids == tokenizer.encode(whole).ids
    context = tokenizer.token_to_id("<IMG_CONTEXT>")
    vectors = [
        offset + first + at
        for one, offset in zip(media, placed.offsets, strict=True)
        for first, number in one.runs
        for at in range(number)
    ]
    found = [at for at, token in enumerate(placed.token_ids) if token == context]
    assert sorted(vectors) == found
    assert processor.placeholder("video", 1) == "<video-2>"
    for wrong, named in (("<video-1><video-3><image-1>", "1, 3"), ("<video-1><image-1>", "1")):
        with pytest.raises(RequestError, match=f"images {named} and comes with 2 media items"):
            processor.place(tokenizer.encode(wrong).ids, media)
    many = [media[0]] * 11
    marks = "".join(f"<video-{n}>" for n in range(1, 12))
    with pytest.raises(RequestError, match="11 videos: this model takes at most 10"):
        processor.place(tokenizer.encode(marks).ids, many)


def test_what_is_refused(config: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> None:
    processor = processor_for(NAME, config, tmp_path)
    for value in (0, 13, "4"):
        with pytest.raises(RequestError, match=f"max_dynamic_tiles = {value!r}"):
            processor.process([item(picture(9, 9))], {"max_dynamic_tiles": value})
    (media,) = processor.process([item(picture(9, 9))], {})
    letters = [tokenizer.token_to_id(letter) for letter in "the"]
    with pytest.raises(RequestError, match="are not those that the tokenizer makes"):
        processor.place([*letters, config["image_token_index"]], [media])
    for stated, changed, named in (
        ({"size": {"height": 64, "width": 64}}, {}, "size = "),
        ({"crop_size": {"height": 16, "width": 16}}, {}, "crop_size = "),
        ({"max_dynamic_tiles": 0}, {}, "max_dynamic_tiles = 0"),
        ({"pad_during_tiling": True}, {}, "pad_during_tiling = True"),
        ({}, {"downsample_ratio": 2}, "downsample_ratio = 2"),
        ({}, {"vision_config": {"image_size": "x"}}, "image_size = 'x'"),
        ({}, {"image_token_index": None}, "image_token_index must be a token id"),
        ({}, {"image_token_index": 3}, "token <IMG_CONTEXT> has the id"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(NAME, {**config, **changed}, tmp_path)
