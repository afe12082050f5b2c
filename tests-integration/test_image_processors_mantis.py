"""Mantis's images: LLaVA's numbers; prompts beside the published formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_image_processors import item, picture
from test_image_processors_internvl_chat import tokenizer as made_tokenizer
from tokenizers import AddedToken, Tokenizer

from headrace_core.errors import RequestError
from headrace_multimodal import processor_for


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of bytes; merges reach over the edges of the texts around an image, and the mark is a token."""
    made = Tokenizer.from_str(made_tokenizer().to_str())
    made.add_special_tokens([AddedToken("<image>", normalized=False, special=True)])
    return made


@pytest.mark.parametrize(
    "text",
    [
        "<image>\nthe of",
        "<s>the <image> of <image>>< in",
        "<image><image>",
        "the <Image> of: <image>",
    ],
)
def test_prompts_are_the_published_ones(text: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mark = tokenizer.token_to_id("<image>")
    config = {
        "image_token_index": mark, "vision_feature_select_strategy": "full",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 28, "width": 28}})
    )
    processor = processor_for("MantisForConditionalGeneration", config, tmp_path)
    images = [item(picture(30, 40)), item(picture(50, 20))][: text.count("<image>")]
    media = processor.process(images, {})
    plain = processor_for("LlavaForConditionalGeneration", config, tmp_path)
    assert media == plain.process(images, {})
    expected = text
    for number in range(len(media)):
        one = f"(image {number + 1}: <Image>{'MARK' * 4}</Image>)"
        expected = expected.replace("<image>", one, 1)
    ids = tokenizer.encode(expected.replace("MARK", "<image>")).ids
    placed = processor.place(tokenizer.encode(text).ids, media)
    assert placed.token_ids == ids
    for offset in placed.offsets:
        assert ids[offset : offset + 4] == [mark] * 4
    with pytest.raises(RequestError, match="there must be one for each"):
        processor.place(tokenizer.encode(text + "<image>").ids, media)
    assert (
        processor.place(tokenizer.encode("the of").ids, []).token_ids
        == tokenizer.encode("the of").ids
    )
