"""Granite Speech in the whole engine: recordings beside text, transcripts, an adapter beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from speech_checkpoints import RATE, save_granite_speech, sound, token_ids

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.granite_speech import GraniteSpeechProcessor

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SECONDS = {"the water <|audio|> runs": 1.5, "<|audio|>the wheel": 3.1, "in the race": 0.0}


def asked(text: str, seconds: float) -> Any:
    if not seconds:
        return text
    return {"prompt": text, "multi_modal_data": {"audio": [(sound(3, seconds), RATE)]}}


def continued(oracle: Any, folder: Path, text: str, seconds: float) -> list[int]:
    """Greedy tokens by transformers."""
    [mark] = token_ids(folder, "<|audio|>")
    ids, media = token_ids(folder, text), {}
    if seconds:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        processor = GraniteSpeechProcessor(config, folder)
        [made] = processor.process([MediaItem("audio", sound(3, seconds), "", {})], {})
        packed = made.inputs["input_features"]
        frames = np.frombuffer(packed.data, np.float32).reshape(packed.shape)
        media = {"input_features": torch.from_numpy(frames.copy())[None]}
        at = ids.index(mark)
        ids[at : at + 1] = [mark] * made.num_tokens
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        out = oracle.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=8, min_new_tokens=8, **media,
        )  # fmt: skip
    found: list[int] = out[0, tokens.shape[1] :].tolist()
    return found


def test_prompts_and_transcripts(tmp_path: Path) -> None:
    oracle = save_granite_speech(tmp_path)
    every = [asked(text, seconds) for text, seconds in SECONDS.items()]
    expected = [continued(oracle, tmp_path, *row) for row in SECONDS.items()]
    for more in ({}, {"max_num_batched_tokens": 13, "max_num_seqs": 4}):
        with LLM(str(tmp_path), **{**SETTINGS, **more}) as llm:
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    text = "USER: <|audio|>translate the speech to German\n ASSISTANT:"
    _add_an_adapter(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        [wanted] = llm.generate(
            [asked(text, 1.5)], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
        )
        [found] = llm.translate(
            (sound(3, 1.5), RATE), to_language="de", temperature=[0], max_tokens=8, use_tqdm=False
        )
        assert found.text == wanted.outputs[0].text.strip()
        [other] = llm.generate([every[1]], PARAMS, use_tqdm=False)
        assert list(other.outputs[0].token_ids) != expected[1]
        with pytest.raises(RequestError, match="adapter for recordings is in its weights"):
            llm.generate(["in the race"], PARAMS, use_tqdm=False)
    with LLM(str(tmp_path), limit_mm_per_prompt={"audio": 0}, **SETTINGS) as llm:
        [alone] = llm.generate(["in the race"], PARAMS, use_tqdm=False)
        assert list(alone.outputs[0].token_ids) == expected[2]


def _add_an_adapter(folder: Path) -> None:
    name = "base_model.model.language_model.model.layers.0.self_attn.q_proj"
    generator = torch.Generator().manual_seed(0)
    halves = {"lora_A": (2, 64), "lora_B": (64, 2)}
    made = {f"{name}.{k}.weight": torch.randn(s, generator=generator) for k, s in halves.items()}
    save_file(made, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
