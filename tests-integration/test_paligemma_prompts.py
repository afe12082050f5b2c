"""PaliGemma in the whole engine: prompts in which every token sees every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from image_checkpoints import picture, save_paligemma
from speech_checkpoints import token_ids
from test_image_prompts import PARAMS, SETTINGS

from headrace import LLM
from headrace_core.errors import RequestError, UnsupportedModel

TEXTS = ("the water", "the water runs", "in the race over the water", "", "the water")
PICTURES = ("a", "a", "a", "b", "b")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("paligemma")
    return folder, save_paligemma(folder)


def asked(text: str, name: str) -> dict[str, Any]:
    return {"prompt": f"<image>{text}", "multi_modal_data": {"image": picture(ord(name))}}


def wanted(saved: tuple[Path, Any], text: str, name: str) -> list[int]:
    from transformers import SiglipImageProcessor

    folder, oracle = saved
    library = SiglipImageProcessor.from_pretrained(folder)
    pixels = library(images=picture(ord(name)), return_tensors="pt")["pixel_values"]
    image, bos = token_ids(folder, "<image><bos>")
    ids = torch.tensor([[image] * 16 + [bos, *token_ids(folder, text), *token_ids(folder, "\n")]])
    out = oracle.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids),
        pixel_values=pixels, do_sample=False, max_new_tokens=8, min_new_tokens=8,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "mode",
    [{}, {"enforce_eager": True}, {"num_gpu_blocks_override": 34}, {"engine_process": True}],
    ids=str,
)
def test_it_equals_transformers(saved: tuple[Path, Any], mode: dict[str, Any]) -> None:
    """Also from caches: a prefix is another where what follows it is."""
    expected = [wanted(saved, *pair) for pair in zip(TEXTS, PICTURES)]
    assert len({tuple(tokens) for tokens in expected}) > 2
    with LLM(str(saved[0]), **{**SETTINGS, **mode}) as model:
        for _ in range(2):
            outputs = model.generate([asked(*pair) for pair in zip(TEXTS, PICTURES)], PARAMS)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected
        for pair, tokens in zip(zip(TEXTS, PICTURES), expected):
            assert list(model.generate(asked(*pair), PARAMS)[0].outputs[0].token_ids) == tokens


def test_what_cannot_be_served_is_refused(saved: tuple[Path, Any]) -> None:
    folder = str(saved[0])
    with LLM(folder, **SETTINGS, max_num_batched_tokens=24) as model:
        with pytest.raises(RequestError, match="multi_modal_data: must be given"):
            model.generate("the water", PARAMS)
        with pytest.raises(
            RequestError, match=r"must be computed in one step, which holds at most 24"
        ):
            model.generate(asked("the water runs over the race in the wheel", "a"), PARAMS)
        model.generate(asked("", "a"), PARAMS)
    with pytest.raises(UnsupportedModel, match="begin with an image, and it can bring none"):
        LLM(folder, **SETTINGS, limit_mm_per_prompt={"image": 0})
