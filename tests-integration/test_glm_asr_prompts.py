"""GLM-ASR in the whole engine: recordings of one piece and of several, beside text, and transcripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speech_checkpoints import RATE, SECONDS, save_glm_asr, sound, token_ids

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CLIPS = {"a": (1, 1.5), "b": (2, 3.1)}
"""Name -> seed and seconds: of one piece, and of two."""
PROMPTS = {"the water <|pad|> runs": "a", "the wheel<|pad|> in <|pad|>": "ab", "in the race": ""}
PIECE = SECONDS * RATE


def asked(text: str, names: str) -> Any:
    media = [(sound(*CLIPS[name]), RATE) for name in names]
    return {"prompt": text, "multi_modal_data": {"audio": media}} if media else text


def continued(oracle: Any, folder: Path, text: str, names: str) -> list[int]:
    """Greedy tokens by transformers."""
    from transformers import WhisperFeatureExtractor

    [mark] = token_ids(folder, "<|pad|>")
    extractor, left = WhisperFeatureExtractor.from_pretrained(folder), list(names)
    ids: list[int] = []
    pieces: list[Any] = []
    for token in token_ids(folder, text):
        if token != mark:
            ids.append(token)
            continue
        samples = sound(*CLIPS[left.pop(0)])
        pieces += [samples[begin : begin + PIECE] for begin in range(0, len(samples), PIECE)]
        ids += [mark] * ((-(-len(samples) // 160) + 1) // 2 // 4)
    media = {}
    if pieces:
        made = extractor(
            pieces, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
        )
        media = {
            "input_features": made["input_features"], "input_features_mask": made["attention_mask"],
        }  # fmt: skip
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        out = oracle.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
            max_new_tokens=8, min_new_tokens=8, **media,
        )  # fmt: skip
    found: list[int] = out[0, tokens.shape[1] :].tolist()
    return found


def test_prompts_and_transcripts(tmp_path: Path) -> None:
    oracle = save_glm_asr(tmp_path)
    every = [asked(text, names) for text, names in PROMPTS.items()]
    expected = [continued(oracle, tmp_path, text, names) for text, names in PROMPTS.items()]
    for more in ({}, {"max_num_batched_tokens": 13, "max_num_seqs": 4}):
        with LLM(str(tmp_path), **{**SETTINGS, **more}) as llm:
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    text = (
        "<|user|>\n<|begin_of_audio|><|pad|><|end_of_audio|><|user|>\n"
        "Please transcribe this audio into text<|assistant|>\n"
    )
    once = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        [wanted] = llm.generate([asked(text, "a")], once, use_tqdm=False)
        given = (sound(*CLIPS["a"]), RATE)
        [found] = llm.transcribe(given, temperature=[0], max_tokens=8, use_tqdm=False)
        with pytest.raises(RequestError, match="special token"):
            llm.transcribe(given, prompt="<|pad|>")
    assert found.text == wanted.outputs[0].text.strip()
