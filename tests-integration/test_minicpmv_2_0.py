"""MiniCPM-V 2.0 in the whole engine, against a plain reading of it: together, in chunks that end within an
image, and from caches. Its config calls its tower by a name, here by that of a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_checkpoints import TEXT, finish, picture
from kin_checkpoints import MINICPMV_MARKS, by_own_processor
from speech_checkpoints import save_tokenizer, token_ids

from headrace import LLM, SamplingParams
from headrace_models.layers.vision.towers import named_vit
from headrace_models.layers.vision.towers.named_vit import VitSizes
from headrace_testing.model.plain.minicpmv_2 import PlainMiniCPMV20

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8, "max_model_len": 256,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
SIZES = VitSizes(48, 80, 2, 3, 8, 5)


def save(folder: Path) -> Any:
    ids = save_tokenizer(folder, ("<|endoftext|>", *MINICPMV_MARKS))
    end = ids["<|endoftext|>"]
    config = {
        **TEXT, "hidden_size": 128, "architectures": ["MiniCPMV"], "model_type": "minicpmv",
        "vision_encoder": "small", "patch_size": 8, "query_num": 4, "drop_vision_last_layer": False,
        "image_token": ids["<unk>"], "tie_word_embeddings": False, "eos_token_id": end,
        "bos_token_id": None, "pad_token_id": end, "scale_emb": 3.0, "scale_depth": 1.4,
        "dim_model_base": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    settings = {
        "patch_size": 8,
        "scale_resolution": 32,
        "max_slice_nums": 4,
        "image_feature_size": 4,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    return finish(folder, PlainMiniCPMV20(config, SIZES), "<unk>", end)


def test_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_vit, "SIZES", {"small": SIZES})
    oracle = save(tmp_path)
    prompts, wanted = [], []
    for text, seeds in (
        ("the <unk> water", (1,)),
        ("<unk>in <unk> race", (2, 1)),
        ("the race", ()),
    ):
        images = [picture(seed) for seed in seeds]
        made = by_own_processor(tmp_path, images)
        [mark] = token_ids(tmp_path, "<unk>")
        items = iter(made["items"])
        ids = [x for i in token_ids(tmp_path, text) for x in (next(items) if i == mark else [i])]
        out = oracle.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            images=made["images"], do_sample=False, max_new_tokens=6, min_new_tokens=6,
        )  # fmt: skip
        wanted.append(out[0, len(ids) :].tolist())
        prompts.append({"prompt": text, "multi_modal_data": {"image": images}} if images else text)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for more in ({}, {"max_num_batched_tokens": 9}):
        with LLM(str(tmp_path), **{**SETTINGS, **more}) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
