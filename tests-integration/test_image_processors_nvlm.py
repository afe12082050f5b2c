"""NVLM-D's image processor: numbers are InternVL's, prompts beside the published formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_image_processors import array, item, picture
from test_image_processors_internvl_chat import CONFIG, PER_TILE
from test_image_processors_internvl_chat import tokenizer as of_internvl
from tokenizers import AddedToken, Tokenizer

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

PAD = "<|vision_pad|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of bytes; merges reach over the edges of the texts around tiles."""
    made = Tokenizer.from_str(of_internvl().to_str())
    made.add_special_tokens([AddedToken(PAD, normalized=False, special=True)])
    return made


@pytest.fixture
def processor(tokenizer: Tokenizer, tmp_path: Path) -> Any:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return processor_for("NVLM_D_Model", CONFIG, tmp_path)


def published(text: str, tiles: list[int]) -> str:
    """A prompt's text as the published ``chat`` writes it."""
    for number in tiles:
        names = [f"<tile_{i}>" for i in range(1, number)] + ["<tile_global_thumbnail>"]
        inner = "".join(f"{name}{PAD * PER_TILE}" for name in names)
        text = text.replace("<image>", f"<Image>{inner}</Image>", 1)
    return text


def test_numbers_are_internvls(processor: Any, tmp_path: Path) -> None:
    other = processor_for("InternVLChatModel", CONFIG, tmp_path)
    for size in ((37, 61), (56, 56)):
        (own,), (base,) = (p.process([item(picture(*size))], {}) for p in (processor, other))
        assert own.inputs == base.inputs


@pytest.mark.parametrize("mark", ["<image>", PAD])
@pytest.mark.parametrize(
    "text", ["<image>\nthe of", "<s>the ><image>, in: <image>", "<image><image>"]
)
def test_prompts_are_the_published_ones(
    text: str, mark: str, processor: Any, tokenizer: Tokenizer
) -> None:
    images = [picture(37, 61), picture(56, 56)][: text.count("<image>")]
    media = processor.process([item(image) for image in images], {})
    tiles = [array(one, "pixel_values").shape[0] for one in media]
    assert tiles[0] > 1
    expected = tokenizer.encode(published(text, tiles)).ids
    placed = processor.place(tokenizer.encode(text.replace("<image>", mark)).ids, media)
    assert placed.token_ids == expected
    pad = tokenizer.token_to_id(PAD)
    vectors = {
        offset + first + at
        for one, offset in zip(media, placed.offsets, strict=True)
        for first, number in one.runs
        for at in range(number)
    }
    assert vectors == {at for at, token in enumerate(expected) if token == pad}
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place(tokenizer.encode(f"{text}<image>".replace("<image>", mark)).ids, media)


def test_images_without_the_whole_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="use_thumbnail = False"):
        processor_for("NVLM_D_Model", {**CONFIG, "use_thumbnail": False}, tmp_path)
