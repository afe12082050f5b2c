"""Kanana-V's images beside transformers' Qwen2-VL, whose numbers they have, and a plain reading of its
published tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from speech_checkpoints import save_tokenizer
from test_image_processors import array, item, picture
from tokenizers import Tokenizer

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

NAME = "KananaVForConditionalGeneration"


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    end = save_tokenizer(tmp_path, ("<|eot|>", "<|reserved|>"))["<|eot|>"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14}))
    return processor_for(
        NAME, {"vision_config": {}, "text_config": {"eos_token_id": end}}, tmp_path
    )


@pytest.mark.parametrize("size", [(300, 211), (90, 131), (64, 64), (20, 50), (9, 31), (1500, 1300)])
def test_numbers_are_those_of_qwen2_vl(size: tuple[int, int], processor: Any) -> None:
    """Of an image that is made larger first, where it is narrower than a token."""
    from transformers import Qwen2VLImageProcessor

    image = picture(*size)
    (own,) = processor.process([item(image)], {})
    least = min(size)
    if least < 28:
        scale = 28 / least
        image = image.resize((int(size[1] * scale), int(size[0] * scale)), 3)
    library = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    made = library(images=image, return_tensors="np")
    np.testing.assert_allclose(array(own, "pixel_values"), made["pixel_values"], atol=1e-5, rtol=0)
    grid = array(own, "image_grid_thw").tolist()
    assert [grid] == made["image_grid_thw"].tolist()
    assert own.num_tokens == grid[1] // 2 * (grid[2] // 2 + 1)
    assert sum(number for _, number in own.runs) == grid[1] * grid[2] // 4


def published(
    text: str, grids: list[tuple[int, int]], tokenizer: Tokenizer, mark: int
) -> list[int]:
    """Pieces around images and roles are tokens by themselves; rows have line ends before and between."""

    def ids(piece: str) -> list[int]:
        found: list[int] = tokenizer.encode(piece, add_special_tokens=False).ids
        return found

    found, waiting = [], iter(grids)
    for piece in re.split("(<image>|\nAI: |\nHuman: )", text):
        if piece != "<image>":
            found += ids(piece)
            continue
        rows, columns = next(waiting)
        found += ids("\n")
        for row in range(rows):
            found += [mark] * columns + (ids("\n") if row < rows - 1 else [])
    return found


@pytest.mark.parametrize(
    "text",
    [
        "the\nHuman: <image>\nHuman: the water\nAI: ",
        "<image><image>",
        "in <image> the\n<image>\nAI: the",
    ],
)
def test_prompts_are_the_published_ones(text: str, processor: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    images = [item(picture(60, 90)), item(picture(64, 30))][: text.count("<image>")]
    media = processor.process(images, {})
    grids = [
        (int(grid[1]) // 2, int(grid[2]) // 2)
        for grid in (array(one, "image_grid_thw") for one in media)
    ]
    [mark] = processor.placeholder_ids
    expected = published(text, grids, tokenizer, mark)
    placed = processor.place(tokenizer.encode(text).ids, media)
    assert list(placed.token_ids) == expected
    for offset, one in zip(placed.offsets, media, strict=True):
        assert tuple(expected[offset : offset + one.num_tokens]) == one.token_ids
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place(tokenizer.encode(text + "<image>").ids, media)


def test_other_tokens_of_the_same_text_stay(processor: Any, tmp_path: Path) -> None:
    """As a client may bring them; an image is the placeholder there."""
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    [mark] = processor.placeholder_ids
    bytewise = [id for letter in "the water" for id in tokenizer.encode(letter).ids]
    assert bytewise != tokenizer.encode("the water").ids
    media = processor.process([item(picture(60, 60))], {})
    placed = processor.place([*bytewise, mark], media)
    assert list(placed.token_ids) == [*bytewise, *media[0].token_ids]
    facts = {"image_grid_thw": [1, 4, 6]}
    made = processor.embedded("image", 6, facts)
    assert (made.num_tokens, made.runs) == (8, ((1, 3), (5, 3)))


def test_what_is_refused(processor: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="more than 200 times"):
        processor.process([item(picture(1, 300))], {})
    with pytest.raises(UnsupportedModel, match=r"text_config\.eos_token_id = \[1\]"):
        processor_for(NAME, {"text_config": {"eos_token_id": [1]}}, tmp_path)
