"""Fuyu's image processor beside that of its library: numbers, and whole prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_image_processors import array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

TOKENS = {"<s>": 1, "<0x04>": 8, "|NEWLINE|": 70, "|SPEAKER|": 71}


def library(folder: Path, **settings: Any) -> Any:
    from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil

    made = FuyuImageProcessorPil(**settings)
    made.save_pretrained(folder)
    tokens = {str(number): {"content": token} for token, number in TOKENS.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    return made


def expected(library: Any, image: Any, patch: int) -> tuple[np.ndarray[Any, Any], int, int]:
    """Patches of the picture without what fills it up to the largest size; rows and columns."""
    made = library(images=image)
    whole = np.asarray(made["images"][0][0])
    height, width = made["image_unpadded_heights"][0][0], made["image_unpadded_widths"][0][0]
    rows, columns = -(-height // patch), -(-width // patch)
    return library.patchify_image(whole[:, : rows * patch, : columns * patch]), rows, columns


@pytest.mark.parametrize("size", [(37, 61), (90, 31), (300, 500), (2000, 700), (60, 60)])
@pytest.mark.parametrize(
    "settings", [{}, {"size": {"height": 120, "width": 180}, "padding_value": 3.0}]
)
def test_numbers(size: tuple[int, int], settings: dict[str, Any], tmp_path: Path) -> None:
    theirs, image = library(tmp_path, **settings), picture(*size)
    (own,) = processor_for("FuyuForCausalLM", {}, tmp_path).process([item(image)], {})
    patches, rows, columns = expected(theirs, image, 30)
    np.testing.assert_allclose(array(own, "pixel_values"), patches, atol=1e-5, rtol=0)
    assert own.token_ids == ((71,) * columns + (70,)) * rows
    assert sum(number for _, number in own.runs) == len(patches)


@pytest.mark.parametrize("prompt", [[20, 21], [1, 20, 21], [1, 71, 20, 21], [20, 21, 8]])
def test_prompts(prompt: list[int], tmp_path: Path) -> None:
    """As the library's processor has them: patches, the token that begins, a text, the answer's begin."""
    library(tmp_path)
    processor = processor_for("FuyuForCausalLM", {}, tmp_path)
    media = processor.process([item(picture(40, 50))], {})
    placed = processor.place(prompt, media)
    assert placed.token_ids == [*media[0].token_ids, 1, 20, 21, 8]
    assert placed.offsets == [0]
    with pytest.raises(RequestError, match="2 images: this model takes one") as caught:
        processor.place(prompt, media * 2)
    assert caught.value.param == "multi_modal_data"


def test_the_largest(tmp_path: Path) -> None:
    library(tmp_path)
    processor = processor_for("FuyuForCausalLM", {}, tmp_path)
    assert processor.largest("image", {}).num_tokens == 36 * 65
    assert processor.largest("image", {"num_tokens": 500}).num_tokens <= 500
    with pytest.raises(RequestError, match="1 x 5000"):
        processor.process([item(picture(5000, 1))], {})


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"patch_size": {"height": 20, "width": 20}}, "patch_size"), ({"do_pad": False}, "do_pad"),
     ({"size": {"height": 100, "width": 120}}, "so many patches"), ({"padding_mode": "edge"}, "edge")],
)  # fmt: skip
def test_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    library(tmp_path, **settings)
    with pytest.raises(UnsupportedModel, match=named):
        processor_for("FuyuForCausalLM", {}, tmp_path)
