"""A decoder that sees and hears, in the whole engine: prompts of every modality, in every mode."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from image_checkpoints import data_url, picture
from omni_checkpoints import MARKS, QWEN3_MARKS, save_qwen2_5_omni, save_qwen3_omni
from servers import serving
from speech_checkpoints import RATE, sound, token_ids, wav
from together import together
from tokenizers import Tokenizer

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 768,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ITEMS: Mapping[str, tuple[str, Any]] = {
    "a": ("audio", sound(1, 1.5)), "b": ("audio", sound(2, 1.2)), "i": ("image", picture(1, 40, 56)),
    "j": ("image", picture(2, 90, 60)),
}  # fmt: skip
"""Letter in a prompt -> modality and item; "v" is :func:`film`, too long for the smallest caches."""
FPS = 4.0
PROMPTS = (
    "the water <a> runs",
    "<i>",
    "the wheel<a> in <i> the long race over the water<b>",
    "in the race",
    "<j><b><i>",
    "the water <b> runs over",
)
MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "preempted": {
        "num_gpu_blocks_override": 22, "kv_cache_memory_bytes": None, "max_model_len": 128,
        "limit_mm_per_prompt": {"video": 0},
    },
    "two processes": {"engine_process": True},
}  # fmt: skip


def film() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (4, 60, 90, 3), np.uint8)


def letters(text: str) -> str:
    return "".join(letter for letter in (*ITEMS, "v") if f"<{letter}>" in text)


def asked(text: str, marks: Mapping[str, str] = MARKS) -> Any:
    data: dict[str, list[Any]] = {}
    for letter in sorted(letters(text), key=lambda letter: text.index(f"<{letter}>")):
        modality, item = ITEMS.get(letter) or ("video", (film(), {"fps": FPS}))
        data.setdefault(modality, []).append((item, RATE) if modality == "audio" else item)
        text = text.replace(f"<{letter}>", marks[modality])
    return {"prompt": text, "multi_modal_data": data} if data else text


class Oracle:
    """transformers' thinker, for numbers and tokens of headrace's processor."""

    def __init__(self, folder: Path, model: Any, architecture: str) -> None:
        self.folder, self.model = folder, model
        config = json.loads((folder / "config.json").read_text())
        self.processor = processor_for(architecture, config, folder)

    def prompt(self, prompt: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Token ids, and what the library takes beside them."""
        if isinstance(prompt, str):
            return token_ids(self.folder, prompt), {}
        items = [
            _item(modality, item)
            for modality, given in prompt["multi_modal_data"].items()
            for item in given
        ]
        media = self.processor.process(items, {})
        ids = self.processor.place(token_ids(self.folder, prompt["prompt"]), media).token_ids
        found: dict[str, Any] = {}
        for key in {key for one in media for key in one.inputs}:
            found[key] = [_array(one.inputs[key]) for one in media if key in one.inputs]
        return ids, _as_the_library(found)

    def continued(self, prompt: Any) -> list[int]:
        ids, media = self.prompt(prompt)
        tokens = torch.tensor([ids])
        out = self.model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=8, min_new_tokens=8, **media,
        )  # fmt: skip
        made: list[int] = out[0, tokens.shape[1] :].tolist()
        return made


def _item(modality: Any, item: Any) -> MediaItem:
    if modality == "audio":
        return MediaItem("audio", item[0], "", {"sample_rate": item[1]})
    if modality == "video":
        return MediaItem("video", item[0], "", item[1])
    return MediaItem("image", np.asarray(item), "", {})


def _as_the_library(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    made = {}
    for name, arrays in found.items():
        if name == "input_features":
            lengths = torch.tensor([[len(array)] for array in arrays])
            made["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths).long()
            padded = torch.nn.utils.rnn.pad_sequence(arrays, batch_first=True)
            made[name] = padded.transpose(1, 2)
        elif name == "second_per_grid_ts":
            made["video_second_per_grid"] = torch.cat(arrays)
        else:
            made[name] = torch.stack(arrays) if name.endswith("_thw") else torch.cat(arrays)
    return made


def _array(packed: Any) -> torch.Tensor:
    return torch.tensor(np.frombuffer(packed.data, packed.dtype).reshape(packed.shape).copy())


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("omni")
    return Oracle(folder, save_qwen2_5_omni(folder), "Qwen2_5OmniForConditionalGeneration")


@pytest.fixture(scope="module")
def wanted(oracle: Oracle) -> list[list[int]]:
    found = [oracle.continued(asked(text)) for text in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_it_equals_transformers_in_every_mode(
    oracle: Oracle, wanted: list[list[int]], mode: str
) -> None:
    every = [asked(text) for text in PROMPTS]
    with LLM(str(oracle.folder), **{**SETTINGS, **MODES[mode]}) as llm:
        with together(llm, len(every)) if mode == "preempted" else contextlib.nullcontext():
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        again = llm.generate(every, PARAMS, use_tqdm=False)
        stats = llm.engine.stats()
    assert [list(o.outputs[0].token_ids) for o in outputs] == wanted
    assert [list(o.outputs[0].token_ids) for o in again] == wanted
    for output, prompt in zip(outputs, every, strict=True):
        assert output.prompt_token_ids == oracle.prompt(prompt)[0]
    assert (stats.num_preemptions > 0) == (mode == "preempted")
    assert stats.num_free_blocks == stats.num_blocks


def test_every_modality_in_one_prompt(oracle: Oracle) -> None:
    """A video besides, whose frames stand apart by seconds."""
    prompt = asked("the <a> water<i> runs <v> over<b>")
    with LLM(str(oracle.folder), **SETTINGS, max_num_batched_tokens=200) as llm:
        [output] = llm.generate([prompt], PARAMS, use_tqdm=False)
        options = {"use_audio_in_video": True}
        with pytest.raises(RequestError, match=r"use_audio_in_video.*sound is not put between"):
            llm.generate([{**prompt, "mm_processor_kwargs": options}], PARAMS, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == oracle.continued(prompt)


def test_qwen3_omni(tmp_path: Path) -> None:
    """Vectors of images are wider than those of recordings would be, in one batch and in chunks."""
    other = Oracle(tmp_path, save_qwen3_omni(tmp_path), "Qwen3OmniMoeForConditionalGeneration")
    every = [asked(text, QWEN3_MARKS) for text in (*PROMPTS, "the <a> water<i> runs <v> over<b>")]
    expected = [other.continued(prompt) for prompt in every]
    for mode in ("batched", "chunked"):
        with LLM(str(tmp_path), **{**SETTINGS, **MODES[mode]}) as llm:
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == expected
    with LLM(str(tmp_path), **SETTINGS, limit_mm_per_prompt={"image": 0, "video": 0}) as llm:
        [output] = llm.generate(every[:1], PARAMS, use_tqdm=False)
        text = (
            "<|im_start|>user\n<a>names\nTranscribe the German audio into text.<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        [wanted] = llm.generate(
            [asked(text, QWEN3_MARKS)], SamplingParams(temperature=0, max_tokens=8)
        )
        [found] = llm.transcribe(
            (ITEMS["a"][1], RATE), language="de", prompt="names", temperature=[0], max_tokens=8
        )
        with pytest.raises(RequestError, match=r"special token"):
            llm.transcribe((ITEMS["a"][1], RATE), prompt="<|audio_pad|>")
    assert list(output.outputs[0].token_ids) == expected[0]
    assert found.text == wanted.outputs[0].text.strip()


def test_a_video_that_is_longer_in_time_than_in_tokens(oracle: Oracle) -> None:
    """Its last frames, and what follows, stand at places behind the last token's number."""

    def slow(fps: float) -> Any:
        data = {"video": [(film(), {"fps": fps})]}
        return {"prompt": f"{MARKS['video']} the water", "multi_modal_data": data}

    with LLM(str(oracle.folder), **{**SETTINGS, "max_model_len": 320}) as llm:
        [output] = llm.generate([slow(0.1)], PARAMS, use_tqdm=False)
        with pytest.raises(RequestError, match=r"video of 400\.0 s: at most 41\.0 s are accepted"):
            llm.generate([slow(0.01)], PARAMS, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == oracle.continued(slow(0.1))


@pytest.mark.parametrize(
    ("limits", "text"), [({"audio": 0}, "<j>"), ({"image": 0, "video": 0}, "<b>")]
)
def test_a_tower_without_items_is_not_loaded(
    oracle: Oracle, limits: dict[str, int], text: str
) -> None:
    other = "<b>" if text == "<j>" else "<j>"
    with LLM(str(oracle.folder), **SETTINGS, limit_mm_per_prompt=limits) as llm:
        [towers] = llm.apply_model(
            lambda model: [hasattr(model, name) for name in ("audio_tower", "visual")]
        )
        [output] = llm.generate([asked(text)], PARAMS, use_tqdm=False)
        with pytest.raises(RequestError, match="only"):
            llm.generate([asked(other)], PARAMS, use_tqdm=False)
    assert towers == [bool(limits.get(name, 1)) for name in ("audio", "image")]
    assert list(output.outputs[0].token_ids) == oracle.continued(asked(text))


def test_a_chat_brings_files_of_several_modalities(oracle: Oracle) -> None:
    pytest.importorskip("soundfile", reason="audio files need headrace-multimodal[audio]")
    samples = np.round(ITEMS["a"][1] * 32767).astype("<i2").astype(np.float32) / 32768
    media = {"audio": [(samples, RATE)], "image": [ITEMS["i"][1]]}
    text = f"user: {MARKS['audio']}{MARKS['image']}the waterassistant:"
    expected = oracle.continued({"prompt": text, "multi_modal_data": media})
    said = Tokenizer.from_file(str(oracle.folder / "tokenizer.json")).decode(expected)
    file = base64.b64encode(wav(ITEMS["a"][1])).decode()
    content = [
        {"type": "input_audio", "input_audio": {"data": file, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": data_url(ITEMS["i"][1])}},
        {"type": "text", "text": "the water"},
    ]
    argv = (str(oracle.folder), "--dtype", "float32", "--num-threads", "1", "--block-size", "8",
            "--kv-cache-memory-bytes", "16M", "--max-model-len", "768",
            "--served-model-name", "omni")  # fmt: skip
    body = {
        "model": "omni", "messages": [{"role": "user", "content": content}], "temperature": 0,
        "max_tokens": 8, "ignore_eos": True,
    }  # fmt: skip
    with serving(*argv) as running:
        answer = httpx2.post(f"{running.api}/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == said
