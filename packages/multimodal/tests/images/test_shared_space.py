"""Images that are prompts by themselves: where they stand, and what is refused beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace_core.errors import RequestError
from headrace_multimodal.images.shared_space import ClipProcessor, SiglipProcessor

tokenizers = pytest.importorskip("tokenizers")

CONFIG = {"vision_config": {"image_size": 8}}
PIXELS = np.arange(9 * 12 * 3, dtype=np.uint8).reshape(9, 12, 3)


@pytest.fixture
def processor(tmp_path: Path) -> ClipProcessor:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"water": 0}))
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return ClipProcessor(CONFIG, tmp_path)


@pytest.mark.parametrize("tokens", [[], [1, 2]], ids=["nothing", "marks of an empty text"])
def test_an_image_is_one_token_in_place_of_a_text(
    processor: ClipProcessor, tokens: list[int]
) -> None:
    item = processor.one(PIXELS, {})
    placed = processor.place(tokens, [item])
    assert (len(placed.token_ids), placed.offsets, item.num_tokens) == (1, [0], 1)
    assert item.inputs["pixel_values"].shape == (3, 8, 8)


def test_text_and_further_images_are_refused(processor: ClipProcessor) -> None:
    item = processor.one(PIXELS, {})
    with pytest.raises(RequestError, match=r"^prompt: must be empty beside an image"):
        processor.place([1, 0, 2], [item])
    with pytest.raises(RequestError, match=r"^multi_modal_data: 2 images"):
        processor.place([1, 2], [item, item])


def test_numbers_that_a_checkpoint_leaves_out_are_its_class_s(tmp_path: Path) -> None:
    white = np.full((8, 8, 3), 255, np.uint8)
    for kind, number in ((ClipProcessor, 1.93), (SiglipProcessor, 1.0)):
        made = kind(CONFIG, tmp_path).one(white, {}).inputs["pixel_values"]
        first = np.frombuffer(made.data, np.float32)[0]
        assert first == pytest.approx(number, abs=5e-3)
