"""Pruned videos in the whole engine, beside transformers with the dropped tokens masked out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_checkpoints import picture
from speech_checkpoints import token_ids
from video_checkpoints import QWEN_FILM, QWEN_MARK, save_qwen2_5, save_qwen3

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, RequestError
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal import processor_for

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 512,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = "the water MARK in FILM runs"
RATE = 0.6
MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "chunked": {"max_num_batched_tokens": 8},
    "preempted": {"num_gpu_blocks_override": 14, "max_model_len": 100},
    "process": {"engine_process": True, "mm_processor_cache_type": "shm"},
}
FILM = np.random.default_rng(3).integers(0, 256, (8, 60, 90, 3), np.uint8)
KNOWN = {"fps": 4.0, "total_num_frames": 8, "frames_indices": list(range(8))}


def prompts() -> list[dict[str, Any]]:
    text = TEXT.replace("MARK", QWEN_MARK).replace("FILM", QWEN_FILM)
    data = {"image": picture(1, 40, 56), "video": (FILM, KNOWN)}
    other = {"image": picture(2, 40, 56), "video": (FILM[::-1], KNOWN)}
    return [{"prompt": text, "multi_modal_data": given} for given in (data, other)]


def wanted(oracle: Any, folder: Path) -> list[int]:
    """The library's tokens for the first prompt, which are chosen one by one."""
    config = json.loads((folder / "config.json").read_text())
    processor = processor_for(config["architectures"][0], config, folder)
    items = [
        MediaItem("image", np.asarray(picture(1, 40, 56)), "", {}),
        MediaItem("video", FILM, "", KNOWN),
    ]
    media = processor.process(items, {})
    placed = processor.place(token_ids(folder, prompts()[0]["prompt"]), media)
    ids = torch.tensor([placed.token_ids])
    inputs = {name: _tensor(one) for made in media for name, one in made.inputs.items()}
    kinds = (ids == config["image_token_id"]).int() + 2 * (ids == config["video_token_id"]).int()
    facts = {n: t for n, t in inputs.items() if not n.startswith("pixel")}
    places, _ = oracle.model.get_rope_index(
        input_ids=ids, mm_token_type_ids=kinds, attention_mask=torch.ones_like(ids), **facts
    )
    mask = torch.ones_like(ids)
    rows = (ids[0] == config["video_token_id"]).nonzero().flatten()
    mask[0, rows[dropped(oracle, inputs, len(rows))]] = 0
    found: list[int] = []
    for _ in range(PARAMS.max_tokens or 0):
        logits = oracle(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            mm_token_type_ids=kinds,
            **inputs,
        ).logits
        found.append(int(logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([found[-1:]])], dim=1)
        mask, kinds = (
            torch.nn.functional.pad(t, (0, 1), value=v) for t, v in ((mask, 1), (kinds, 0))
        )
        places = torch.cat(
            [places, places[..., -1:].amax(0, keepdim=True).expand(3, 1, 1) + 1], dim=2
        )
    return found


def dropped(oracle: Any, inputs: Mapping[str, torch.Tensor], number: int) -> list[int]:
    """The video's tokens that are most like those of the frame before, by the library's vectors."""
    out = oracle.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    vectors = torch.cat(
        [one if torch.is_tensor(one) else torch.cat(list(one)) for one in levels], 1
    )
    frames = vectors.view(int(inputs["video_grid_thw"][0, 0]), -1, vectors.shape[1])
    alike = torch.nn.functional.cosine_similarity(frames[1:], frames[:-1], dim=-1).flatten()
    most = alike.argsort(descending=True)[: number - int(number * (1 - RATE))]
    return (most + frames.shape[1]).tolist()


def _tensor(packed: Any) -> torch.Tensor:
    made = torch.tensor(np.frombuffer(packed.data, packed.dtype).reshape(packed.shape).copy())
    return made[None] if made.shape == (3,) else made


@pytest.mark.parametrize(
    ("save", "modes"), [(save_qwen2_5, tuple(MODES)), (save_qwen3, ("chunked",))]
)
def test_it_equals_transformers(save: Any, modes: Sequence[str], tmp_path: Path) -> None:
    oracle = save(tmp_path)
    with torch.inference_mode():
        expected = wanted(oracle, tmp_path)
    for mode in modes:
        with LLM(str(tmp_path), **{**SETTINGS, **MODES[mode]}, video_pruning_rate=RATE) as model:
            for _ in range(2):  # the second time from caches
                found = [
                    list(out.outputs[0].token_ids) for out in model.generate(prompts(), PARAMS)
                ]
                assert found[0] == expected, mode
                print(
                    mode, [len(out.prompt_token_ids) for out in model.generate(prompts(), PARAMS)]
                )
                assert found[1] != expected


def test_rates_are_checked(tmp_path: Path) -> None:
    save_qwen2_5(tmp_path)
    for rate in (1.0, -0.1):
        with pytest.raises(ConfigError, match=r"video_pruning_rate = .*from 0 to below 1"):
            LLM(str(tmp_path), **SETTINGS, video_pruning_rate=rate)
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs\.video_pruning_rate = 2"):
        LLM(str(tmp_path), **SETTINGS, mm_processor_kwargs={"video_pruning_rate": 2})
    with LLM(str(tmp_path), **SETTINGS) as model:
        [prompt, _] = prompts()
        number = [
            len(model.generate({**prompt, "mm_processor_kwargs": own}, PARAMS)[0].prompt_token_ids)
            for own in ({}, {"video_pruning_rate": 0.5}, {"video_pruning_rate": 0})
        ]
        with pytest.raises(RequestError, match=r"video_pruning_rate = 1\.5"):
            model.generate({**prompt, "mm_processor_kwargs": {"video_pruning_rate": 1.5}}, PARAMS)
        with pytest.raises(RequestError, match=r"video_pruning_rate = 1\.5"):
            model.chat([{"role": "user", "content": "no video"}], PARAMS, use_tqdm=False,
                       mm_processor_kwargs={"video_pruning_rate": 1.5})  # fmt: skip
    assert number[0] == number[2]
    frames = 4
    per = (number[0] - number[1]) * 2 // frames
    assert number[0] - number[1] == frames * per - int(frames * per * 0.5)


def test_numbers_of_kept_tokens() -> None:
    from headrace_multimodal.video.pruning import num_retained, pruned

    assert [num_retained(4, 30, rate) for rate in (0.0, 0.5, 0.74, 0.75, 0.99)] == [
        120,
        60,
        31,
        30,
        30,
    ]
    assert [num_retained(frames, 1, 0.9) for frames in (1, 2, 5)] == [1, 2, 2]
    whole = ProcessedMedia({}, 8, (7, 9, 9, 8, 7, 9, 9, 8), ((1, 2), (5, 2)))
    made = pruned(whole, (2, 2, 4), 2, 9, 0.4)
    assert (made.num_tokens, made.token_ids, made.runs) == (6, (9,) * 6, ())
    assert made.inputs["unpruned_token_ids"].tolist() == [7, -1, -1, 8, 7, -1, -1, 8]
    assert made.inputs["num_retained_tokens"].tolist() == [6]
    assert pruned(whole, (1, 4, 4), 2, 9, 0.9) is whole
