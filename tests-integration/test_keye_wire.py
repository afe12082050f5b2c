"""Keye-VL in the whole engine and over a socket: images, and videos whose frames see each other."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from image_checkpoints import TEXT, data_url, picture
from posted import post, stream
from servers import serving
from speech_checkpoints import save_tokenizer, token_ids

from headrace import LLM, SamplingParams
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for
from headrace_testing.model.decoders import randomise
from headrace_testing.model.plain.keye import PlainKeye

NAME = "KeyeForConditionalGeneration"
MARKS = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 320,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
KNOWN = {"fps": 16.0, "total_num_frames": 30, "frames_indices": [0, 9, 20, 29]}
FILM = np.random.default_rng(7).integers(0, 256, (4, 60, 90, 3), np.uint8)
Parts = Sequence[str | int]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Pieces of a prompt: texts, numbers of pictures, and 0 for the video."""
    folder = tmp_path_factory.mktemp("keye")
    ids = save_tokenizer(folder, MARKS)
    text = {**TEXT, "head_dim": 12}
    config = {
        **text, "architectures": [NAME], "model_type": "Keye", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": {"type": "default", "mrope_section": [2, 2, 2]},
        "attention_bias": False, "tie_word_embeddings": False, "eos_token_id": ids["<|endoftext|>"],
        "image_token_id": ids["<|image_pad|>"], "image_token": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 56, "patch_size": 14, "spatial_merge_size": 2, "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    model = PlainKeye(config, text, joined=False).eval()
    randomise(model)
    model.save_pretrained(folder)
    settings = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 8, "temporal_patch_size": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    words = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder, model


def marked(parts: Parts) -> str:
    pads = {True: "<|video_pad|>", False: "<|image_pad|>"}
    return "".join(
        part if isinstance(part, str) else f"<|vision_start|>{pads[part == 0]}<|vision_end|>"
        for part in parts
    )


def wanted(saved: tuple[Path, Any], parts: Parts) -> list[int]:
    folder, model = saved
    config = json.loads((folder / "config.json").read_text())
    processor = processor_for(NAME, config, folder)
    items = [
        MediaItem("image", np.asarray(picture(part)), "", {})
        if part
        else MediaItem("video", FILM, "", KNOWN)
        for part in parts
        if isinstance(part, int)
    ]
    media = processor.process(items, {})
    ids = processor.place(token_ids(folder, marked(parts)), media).token_ids
    ids = [config["image_token_id"] if i == config["video_token_id"] else i for i in ids]
    given = [
        {
            name.replace("_videos", "").replace("video_", "image_"): torch.tensor(
                np.frombuffer(x.data, x.dtype).reshape(x.shape)
            )
            for name, x in one.inputs.items()
        }
        for one in media
    ]
    found: list[int] = []
    for _ in range(6):
        tokens = torch.tensor([[*ids, *found]])
        with torch.inference_mode():
            logits = model(tokens, torch.ones_like(tokens), given).logits[0, -1]
        found.append(int(logits.argmax()))
    return found


def asked(parts: Parts) -> Any:
    data: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, int):
            item: Any = picture(part) if part else (FILM, KNOWN)
            data.setdefault("image" if part else "video", []).append(item)
    return {"prompt": marked(parts), "multi_modal_data": data} if data else marked(parts)


PROMPTS: tuple[Parts, ...] = (
    ["the water ", 0, " runs"], ["the ", 1, " race"], [0], [1, " in ", 0, "over", 2], ["in the race"],
)  # fmt: skip
MODES: tuple[dict[str, Any], ...] = (
    {}, {"max_num_batched_tokens": 13, "max_num_seqs": 4}, {"num_gpu_blocks_override": 40},
    {"engine_process": True, "mm_processor_cache_type": "shm"},
)  # fmt: skip


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_it_equals_the_plain_reading(saved: tuple[Path, Any], mode: dict[str, Any]) -> None:
    expected = [wanted(saved, parts) for parts in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    with LLM(str(saved[0]), **{**SETTINGS, **mode}) as llm:
        for _ in range(2):  # the second time from caches
            outputs = llm.generate([asked(parts) for parts in PROMPTS], PARAMS, use_tqdm=False)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def body(parts: Parts) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture(part))}}
        if isinstance(part, int)
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"model": "keye", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": 6, "ignore_eos": True}  # fmt: skip


def test_over_a_socket(saved: tuple[Path, Any]) -> None:
    words = ("--dtype", "float32", "--max-model-len", "320", "--kv-cache-memory-bytes", "16777216")
    with serving(str(saved[0]), *words, "--served-model-name", "keye") as server:
        url = f"{server.api}/chat/completions"
        for parts in (["the ", 1, " water"], [1, "runs ", 2], ["in the race"]):
            made = post(url, {**body(parts), "return_token_ids": True})
            assert made["choices"][0]["token_ids"] == wanted(saved, parts)
            events = stream(url, body(parts))
            pieces = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
            assert "".join(pieces) == made["choices"][0]["message"]["content"]
        wrong = body(["the ", 1])
        data = base64.b64encode(b"a text that is called x.png").decode()
        wrong["messages"][0]["content"][1]["image_url"]["url"] = f"data:image/png;base64,{data}"
        answer = httpx2.post(url, json=wrong, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"
