"""Phi-4-multimodal in the whole engine: prompts with images, recordings, both and neither, each with the
adapter of the checkpoint that is for it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from image_checkpoints import data_url, picture
from phi4_checkpoints import RANKS, library_inputs, save_phi4_multimodal
from posted import post, stream
from servers import serving
from speech_checkpoints import RATE, sound, token_ids, wav

from headrace import LLM, SamplingParams
from headrace.lora import LoRARequest
from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 320,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ITEMS: Mapping[str, tuple[str, Any]] = {
    "a": ("audio", sound(1, 1.3)), "b": ("audio", sound(2, 1.3)), "i": ("image", picture(1, 40, 56)),
    "j": ("image", picture(2, 100, 30)),
}  # fmt: skip
PROMPTS = (
    "the water <a> runs", "<i>", "<|user|>the <i> long <a> race<|end|><|assistant|>", "in the race",
    "<j> over <i>", "<b><a>wheel", "the water <a> runs over",
)  # fmt: skip
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"enforce_eager": True},
    {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    {"num_gpu_blocks_override": 40},
    {"engine_process": True, "mm_processor_cache_type": "shm"},
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("phi4")
    return folder, save_phi4_multimodal(folder)


def asked(text: str, marks: bool = True) -> Any:
    """A prompt with marks by numbers, or with the tokens of vectors."""
    data: dict[str, list[Any]] = {}
    for letter in re.findall(r"<(\w)>", text):
        modality, item = ITEMS[letter]
        data.setdefault(modality, []).append((item, RATE) if modality == "audio" else item)
        mark = f"<|{modality}_{len(data[modality])}|>"
        plain = "<|endoftext10|>" if modality == "image" else "<|endoftext11|>"
        text = text.replace(f"<{letter}>", mark if marks else plain)
    return {"prompt": text, "multi_modal_data": data} if data else text


def wanted(
    saved: tuple[Path, Mapping[str, Any]], text: str, adapter: str | None = None
) -> list[int]:
    """What transformers' model says, with the adapter that the published code would switch on."""
    folder, models = saved
    prompt = asked(text, marks=False)
    given: dict[str, Any] = {}
    ids = token_ids(folder, prompt if isinstance(prompt, str) else prompt["prompt"])
    own = ""
    if not isinstance(prompt, str):
        data = prompt["multi_modal_data"]
        own = "vision-lora" if "image" in data else "speech-lora"
        config = json.loads((folder / "config.json").read_text())
        processor: Any = processor_for("Phi4MultimodalForCausalLM", config, folder)
        numbers = {modality: len(items) for modality, items in data.items()}
        options = processor.options_for_numbers(numbers, {})
        items = [_item(modality, item) for modality, given in data.items() for item in given]
        media = processor.process(items, options)
        ids, given = processor.place(ids, media).token_ids, library_inputs(media)
    model = models[own if adapter is None else adapter]
    found = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
        max_new_tokens=8, min_new_tokens=8, **given,
    )  # fmt: skip
    told: list[int] = found[0].tolist()
    return told[len(ids) :]


def _item(modality: Any, item: Any) -> MediaItem:
    data = item[0] if modality == "audio" else np.asarray(item)
    return MediaItem(modality, data, "", {})


def told(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.keep(3, every_value=False)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_it_equals_transformers(
    saved: tuple[Path, Mapping[str, Any]], mode: dict[str, Any]
) -> None:
    """One by one, beside each other, and from caches; without a word about adapters."""
    expected = [wanted(saved, text) for text in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for text in PROMPTS[:3]:
        assert wanted(saved, text, "") != wanted(saved, text), "adapters must matter"
    with LLM(str(saved[0]), **{**SETTINGS, **mode}) as llm:
        for marks in (True, False):
            prompts = [asked(text, marks) for text in PROMPTS]
            assert told(llm.generate(prompts, PARAMS, use_tqdm=False)) == expected
        for text, tokens in zip(PROMPTS, expected, strict=True):
            assert told(llm.generate(asked(text), PARAMS, use_tqdm=False)) == [tokens]


def test_the_operator_may_choose(saved: tuple[Path, Mapping[str, Any]]) -> None:
    folder = saved[0]
    speech = {"audio": str(folder / "speech-lora")}
    texts = PROMPTS[:3]
    with LLM(
        str(folder), **SETTINGS, enable_lora=True, max_lora_rank=8, default_mm_loras=speech
    ) as llm:
        expected = [
            wanted(saved, text, name)
            for text, name in zip(texts, ("speech-lora", "", "speech-lora"), strict=True)
        ]
        assert (
            told(llm.generate([asked(text) for text in texts], PARAMS, use_tqdm=False)) == expected
        )
    with LLM(str(folder), **SETTINGS) as llm:
        named = LoRARequest("mine", 9, str(folder / "speech-lora"))
        outputs = llm.generate([asked(text) for text in texts], PARAMS, use_tqdm=False)
        assert [getattr(o.lora_request, "lora_name", None) for o in outputs] == [
            "audio", "image", "image",
        ]  # fmt: skip
        outputs = llm.generate(asked(texts[1]), PARAMS, lora_request=named, use_tqdm=False)
        assert told(outputs) == [wanted(saved, texts[1], "speech-lora")]
    with LLM(str(folder), **SETTINGS, limit_mm_per_prompt={"image": 0}) as llm:
        assert told(llm.generate(asked(texts[0]), PARAMS, use_tqdm=False)) == [
            wanted(saved, texts[0])
        ]
        with pytest.raises(RequestError, match="image"):
            llm.generate(asked(texts[1]), PARAMS, use_tqdm=False)


def test_without_adapters_the_base_answers(
    saved: tuple[Path, Mapping[str, Any]], tmp_path: Path
) -> None:
    for file in saved[0].iterdir():
        if file.name not in RANKS:
            (tmp_path / file.name).symlink_to(file)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        texts = PROMPTS[:3]
        found = told(llm.generate([asked(text) for text in texts], PARAMS, use_tqdm=False))
        assert found == [wanted(saved, text, "") for text in texts]


def body(text: str) -> dict[str, Any]:
    content: list[Any] = []
    for piece in re.split(r"(<\w>)", text):
        if piece[1:-1] not in ITEMS:
            content += [{"type": "text", "text": piece}] if piece else []
            continue
        modality, item = ITEMS[piece[1:-1]]
        if modality == "image":
            content.append({"type": "image_url", "image_url": {"url": data_url(item)}})
            continue
        data = base64.b64encode(wav(item)).decode()
        content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    return {"model": "phi", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": 8, "ignore_eos": True}  # fmt: skip


def test_over_a_socket(saved: tuple[Path, Mapping[str, Any]]) -> None:
    words = ("--dtype", "float32", "--max-model-len", "320", "--kv-cache-memory-bytes", "16777216")
    with serving(str(saved[0]), *words, "--served-model-name", "phi") as server:
        url, found = f"{server.api}/chat/completions", []
        for text in ("the <i> water", "<i> in <j> the", "the <i> race", "in the race"):
            made = post(url, {**body(text), "return_token_ids": True})
            lines = "\n".join(piece for piece in re.split(r"(<\w>)", text) if piece)
            expected = wanted(saved, f"<|user|>{lines}<|end|><|assistant|>")
            assert made["choices"][0]["token_ids"] == expected
            events = stream(url, body(text))
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(pieces) == made["choices"][0]["message"]["content"]
            found.append(expected)
        heard = post(url, body("the <a> water"))  # 16 bits a sample are not the numbers above
        assert heard["usage"]["prompt_tokens"] > 16
        assert post(url, body("the <a> in <i> water"))["usage"]["prompt_tokens"] > 30
        wrong = body("the <i> water")
        data = base64.b64encode(b"a text that is called x.png").decode()
        wrong["messages"][0]["content"][1]["image_url"]["url"] = f"data:image/png;base64,{data}"
        answer = httpx2.post(url, json=wrong, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"
        again = post(url, {**body("in the race"), "return_token_ids": True})
        assert again["choices"][0]["token_ids"] == found[-1]
        listed = httpx2.get(f"{server.api}/models", timeout=60).json()["data"]
        assert [model["id"] for model in listed] == ["phi"]
