"""Fun-ASR-Nano, Gemma 3n, Gemma 4, MiDashengLM, Music Flamingo and Ultravox in the whole engine: prompts with
recordings, beside text and in chunks, and transcripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hearing_checkpoints
import numpy as np
import pytest
import torch
from captured import Comparison, make_worker
from hearing_checkpoints import Oracle
from speech_checkpoints import RATE, sound, token_ids

from headrace import LLM, SamplingParams
from headrace_core.errors import UnsupportedFeature
from headrace_core.multimodal import MediaItem
from headrace_models.families.omni import gemma3n
from headrace_models.layers.convolutional import mobilenet_v5
from headrace_models.layers.convolutional.mobilenet_v5 import Edge, Inverted, Query, Table
from headrace_multimodal import processor_for

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ONCE = SamplingParams(temperature=0, max_tokens=8)
CHUNKED = {"max_num_batched_tokens": 13, "max_num_seqs": 4}
PLAIN = "in the race"
CLIP, LONGER = sound(1, 1.5), sound(2, 3.1)
PICTURE = np.random.default_rng(3).integers(0, 256, (50, 70, 3), np.uint8)
TABLE = Table(
    8,
    (
        (Edge(8, 2),),
        (Inverted(16, 3, 6, 5, 2),),
        (Inverted(24, 5, 6, 5, 2), Query(3, 8, 2)),
        (Inverted(32, 5, 6, 5, 2), Query(2, 8)),
    ),
)


def asked(text: str, media: Sequence[Any]) -> Any:
    data: dict[str, list[Any]] = {}
    for item in media:
        kind, own = ("audio", (item, RATE)) if item.ndim == 1 else ("image", item)
        data.setdefault(kind, []).append(own)
    return {"prompt": text, "multi_modal_data": data}


def expected(folder: Path, oracle: Oracle, text: str, media: Sequence[Any]) -> list[int]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (folder / "language").is_dir():
        config["text_config"] = json.loads((folder / "language" / "config.json").read_text())
    processor = processor_for(config["architectures"][0], config, folder)
    items = [MediaItem("audio" if x.ndim == 1 else "image", x, "0" * 64, {}) for x in media]
    made = processor.process(items, {})
    return oracle(processor.place(token_ids(folder, text), made).token_ids, made)


def check(folder: Path, oracle: Oracle, text: str, media: Sequence[Any]) -> None:
    """In one step and in chunks that end within items, with another prompt beside it."""
    wanted = expected(folder, oracle, text, media)
    assert len(set(wanted)) > 1
    others = []
    for more in ({}, CHUNKED):
        with LLM(str(folder), **{**SETTINGS, **more}) as llm:
            own, other = llm.generate([asked(text, media), PLAIN], PARAMS, use_tqdm=False)
        assert list(own.outputs[0].token_ids) == wanted
        others.append(other.outputs[0].token_ids)
    assert others[0] == others[1]


def check_transcript(folder: Path, text: str, **options: Any) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        [wanted] = llm.generate([asked(text, [CLIP])], ONCE, use_tqdm=False)
        [found] = llm.transcribe(
            (CLIP, RATE), temperature=[0], max_tokens=8, use_tqdm=False, **options
        )
    assert found.text == wanted.outputs[0].text.strip()


def test_fun_asr_nano(tmp_path: Path) -> None:
    oracle = hearing_checkpoints.save_fun_asr_nano(tmp_path)
    check(tmp_path, oracle, "the water <|object_ref_start|> runs", [CLIP])
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "语音转写成英文：<|object_ref_start|><|im_end|>\n<|im_start|>assistant\n"
    )
    check_transcript(tmp_path, text, language="en")


def test_music_flamingo(tmp_path: Path) -> None:
    """Of one piece, and of two."""
    oracle = hearing_checkpoints.save_music_flamingo(tmp_path)
    check(tmp_path, oracle, "the water <sound> runs in <sound> the race", [CLIP, LONGER])


def test_ultravox(tmp_path: Path) -> None:
    """Of one window, and of two."""
    oracle = hearing_checkpoints.save_ultravox(tmp_path)
    check(tmp_path, oracle, "the water <|audio|> runs in <|audio|> the race", [CLIP, LONGER])


def test_midashenglm(tmp_path: Path) -> None:
    """Of one run and a part of a second, and of three; the second stands without the tokens around it."""
    oracle = hearing_checkpoints.save_midashenglm(tmp_path)
    text = "the water <|audio_bos|><|AUDIO|><|audio_eos|> runs in <|AUDIO|> the race"
    check(tmp_path, oracle, text, [CLIP, LONGER])
    again = {"enable_prefix_caching": True, "num_gpu_blocks_override": 16, "max_model_len": 96}
    prompts = [asked(text, [CLIP, LONGER]), PLAIN, asked("<|AUDIO|> the", [LONGER])]
    with LLM(str(tmp_path), **SETTINGS) as llm, LLM(str(tmp_path), **SETTINGS | again) as small:
        wanted = [llm.generate(prompt, PARAMS)[0].outputs[0].token_ids for prompt in prompts]
        for _ in range(2):  # the second time from caches
            found = [output.outputs[0].token_ids for output in small.generate(prompts, PARAMS)]
            assert found == wanted


def check_captured(folder: Path) -> None:
    """Steps are replayed, also with tokens of images and recordings, which a model may say itself."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    worker = make_worker(folder, dtype="float32")
    try:
        compared = Comparison(worker, text["vocab_size"])
        batch = compared.batch([(1, 9), (1, 20), (1, 5)])
        image, sound = token_ids(folder, "<image_soft_token><audio_soft_token>")
        compared.check(replace(batch, input_ids=torch.tensor([image, sound, 7])))
    finally:
        worker.close()


def test_gemma_3n(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mobilenet_v5, "TABLES", {"tiny": TABLE})
    monkeypatch.setattr(gemma3n, "TABLES", {"tiny": TABLE})
    oracle = hearing_checkpoints.save_gemma3n(tmp_path, TABLE)
    text = "the <image_soft_token> water <audio_soft_token> runs <image_soft_token>"
    check(tmp_path, oracle, text, [PICTURE, CLIP, PICTURE[::-1].copy()])
    text = (
        "<start_of_turn>user\nTranscribe this audio into text: <audio_soft_token><end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    check_transcript(tmp_path, text)
    check_captured(tmp_path)
    refused = pytest.raises(UnsupportedFeature, match="this model takes audio only")
    with LLM(str(tmp_path), **SETTINGS, limit_mm_per_prompt={"image": 0}) as llm, refused:
        llm.generate([asked("<image_soft_token>", [PICTURE])])


def test_gemma_4(tmp_path: Path) -> None:
    oracle = hearing_checkpoints.save_gemma4(tmp_path)
    check(tmp_path, oracle, "the <|image|> water <|audio|> runs", [PICTURE, CLIP])
