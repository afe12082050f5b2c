"""InstructBLIP in the whole engine: what becomes of an image depends on the text of its prompt."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from image_checkpoints import data_url, picture
from instructblip_checkpoints import save_instructblip
from posted import post, stream
from servers import serving
from speech_checkpoints import token_ids
from test_image_prompts import PARAMS, SETTINGS

from headrace import LLM
from headrace_core.errors import RequestError

CASES = (
    ("the water", "a"), ("the race", "a"), ("in the race over the water", "ab"), ("", "b"),
    ("the water", "b"), ("the water", "a"),
)  # fmt: skip
"""Text and pictures."""
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"enforce_eager": True, "mm_encoder_attn_backend": "sdpa"},
    {"max_num_batched_tokens": 8},
    {"num_gpu_blocks_override": 34},
    {"engine_process": True, "mm_processor_cache_type": "shm"},
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("instructblip")
    return folder, save_instructblip(folder)


def asked(text: str, names: str) -> dict[str, Any]:
    return {
        "prompt": f"{'<image>' * len(names)}{text}",
        "multi_modal_data": {"image": [picture(ord(name)) for name in names]},
    }


def wanted(saved: tuple[Path, Any], text: str, names: str, marked: str = "") -> list[int]:
    """The library's own processor takes one image; of several, each has the text.

    Args:
        marked: the text with marks of images in it, which cut its tokens.
    """
    from transformers import InstructBlipProcessor, PreTrainedTokenizerFast
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    folder, oracle = saved
    tokenizer, former = (
        PreTrainedTokenizerFast(tokenizer_file=str(at / "tokenizer.json"))
        for at in (folder, folder / "qformer_tokenizer")
    )
    images = BlipImageProcessorPil.from_pretrained(folder)
    library = InstructBlipProcessor(images, tokenizer, former, num_query_tokens=5)
    made = [
        library(images=picture(ord(name)), text=text, padding=False, return_tensors="pt")
        for name in names
    ]
    [mark] = token_ids(folder, "<image>")
    ids = [mark] * 5 * (len(names) - 1) + made[0]["input_ids"][0].tolist()
    if marked:
        own = [token for token in token_ids(folder, marked) if token != mark]
        ids = [mark] * 5 * len(names) + own
    out = oracle.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        pixel_values=torch.cat([one["pixel_values"] for one in made]),
        qformer_input_ids=torch.cat([one["qformer_input_ids"] for one in made]),
        do_sample=False, max_new_tokens=8, min_new_tokens=8,
    )  # fmt: skip
    found: list[int] = out[0].tolist()
    return found[len(ids) :]


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_it_equals_transformers(saved: tuple[Path, Any], mode: dict[str, Any]) -> None:
    """Also from caches: the same image beside another text is another item."""
    expected = [wanted(saved, *case) for case in CASES]
    assert len({tuple(tokens) for tokens in expected}) == len(CASES) - 1
    with LLM(str(saved[0]), **{**SETTINGS, **mode}) as model:
        for _ in range(2):
            outputs = model.generate([asked(*case) for case in CASES], PARAMS)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected
        for case, tokens in zip(CASES, expected, strict=True):
            assert list(model.generate(asked(*case), PARAMS)[0].outputs[0].token_ids) == tokens
            ids = token_ids(saved[0], asked(*case)["prompt"])
            prompt = {**asked(*case), "prompt": None, "prompt_token_ids": ids}
            assert list(model.generate(prompt, PARAMS)[0].outputs[0].token_ids) == tokens


def test_what_cannot_be_served_is_refused(saved: tuple[Path, Any]) -> None:
    with LLM(str(saved[0]), **SETTINGS) as model:
        with pytest.raises(RequestError, match="multi_modal_data: must be given"):
            model.generate("the water", PARAMS)
        with pytest.raises(RequestError, match="42 tokens of the Q-Former; it reads at most 40"):
            model.generate(asked("the " * 40, "a"), PARAMS)
        named = {**asked("the water", "a"), "multi_modal_uuids": {"image": ["cat"]}}
        model.generate(named, PARAMS)
        model.generate({**named, "multi_modal_data": {"image": [None]}}, PARAMS)
        other = {**named, "prompt": "the race", "multi_modal_data": {"image": [None]}}
        with pytest.raises(RequestError, match="no item of that name is kept"):
            model.generate(other, PARAMS)


def body(text: str, names: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(picture(ord(n)))}} for n in names]
    content = [*images, {"type": "text", "text": text}]
    return {"model": "blip", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": 8, "ignore_eos": True}  # fmt: skip


def test_over_a_socket(saved: tuple[Path, Any]) -> None:
    """The Q-Former reads what the template makes of the conversation."""
    words = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "16777216")
    with serving(str(saved[0]), *words, "--served-model-name", "blip") as server:
        url = f"{server.api}/chat/completions"
        for text, names in (("the water", "a"), ("the race", "a"), ("the water", "ab")):
            made = post(url, {**body(text, names), "return_token_ids": True})
            whole = f"user: {text}assistant:"  # the template trims what follows a block
            marked = whole.replace(text, "<image>" * len(names) + text)
            expected = wanted(saved, whole, names, marked)
            assert made["choices"][0]["token_ids"] == expected
            events = stream(url, body(text, names))
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(pieces) == made["choices"][0]["message"]["content"]
        wrong = body("the water", "a")
        data = base64.b64encode(b"a text that is called x.png").decode()
        wrong["messages"][0]["content"][0]["image_url"]["url"] = f"data:image/png;base64,{data}"
        answer = httpx2.post(url, json=wrong, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
        again = post(url, {**body("the water", "ab"), "return_token_ids": True})
        assert again["choices"][0]["token_ids"] == expected
