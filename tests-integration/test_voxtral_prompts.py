"""Voxtral in the whole engine: recordings of one piece and of several, beside text, in every mode."""

from __future__ import annotations

import base64
import contextlib

import pytest
import torch
from speech_checkpoints import RATE, SECONDS, save_voxtral, sound, token_ids, wav
from together import together

from headrace import LLM, SamplingParams
from headrace_core.errors import UnsupportedFeature

SETTINGS = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CLIPS = {"a": (1, 1.5), "b": (2, 3.1), "c": (3, 2.0)}
"""Name -> seed and seconds: of one piece, two, and exactly one."""
PROMPTS = {
    "the water [AUDIO] runs": "a",
    "[AUDIO]": "b",
    "the wheel[AUDIO] in [AUDIO] the long race over the water": "ab",
    "in the race": "",
    "[AUDIO][AUDIO]": "cc",
    "the water [AUDIO] runs over": "c",
}
PIECE = SECONDS * RATE
MODES = {
    "batched": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "preempted": {
        "num_gpu_blocks_override": 22,
        "kv_cache_memory_bytes": None,
        "max_model_len": 128,
    },
    "two processes": {"engine_process": True},
}


def clip(name):
    return sound(*CLIPS[name])


def pieces(name):
    return -(-len(clip(name)) // PIECE)


def asked(text, names):
    media = [(clip(name), RATE) for name in names]
    return {"prompt": text, "multi_modal_data": {"audio": media}} if media else text


def expanded(folder, text, names):
    [mark] = token_ids(folder, "[AUDIO]")
    left, ids = list(names), []
    for token in token_ids(folder, text):
        ids += [mark] * 25 * pieces(left.pop(0)) if token == mark else [token]
    return ids


def features(folder, name):
    """[pieces, bins, frames], by transformers."""
    from transformers import WhisperFeatureExtractor

    made = WhisperFeatureExtractor.from_pretrained(folder)(
        clip(name), sampling_rate=RATE, truncation=False, padding=True, pad_to_multiple_of=PIECE,
        return_tensors="pt",
    ).input_features[0]  # fmt: skip
    return torch.stack(made.split(made.shape[1] // pieces(name), dim=1))


def continued(oracle, folder, text, names):
    """Greedy tokens by transformers, without a cache."""
    tokens = expanded(folder, text, names)
    start = len(tokens)
    media = {"input_features": torch.cat([features(folder, n) for n in names])} if names else {}
    for _ in range(PARAMS.max_tokens):
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[start:]


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voxtral")
    return save_voxtral(folder), folder


@pytest.fixture(scope="module")
def wanted(listener):
    return [continued(*listener, text, names) for text, names in PROMPTS.items()]


@pytest.mark.parametrize("mode", MODES)
def test_it_equals_transformers_in_every_mode(listener, wanted, mode):
    folder = listener[1]
    every = [asked(text, names) for text, names in PROMPTS.items()]
    with LLM(str(folder), **{**SETTINGS, **MODES[mode]}) as llm:
        with together(llm, len(every)) if mode == "preempted" else contextlib.nullcontext():
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        again = llm.generate(every, PARAMS, use_tqdm=False)
        stats = llm.engine.stats()
    assert [list(o.outputs[0].token_ids) for o in outputs] == wanted
    assert [list(o.outputs[0].token_ids) for o in again] == wanted
    for output, (text, names) in zip(outputs, PROMPTS.items(), strict=True):
        assert output.prompt_token_ids == expanded(folder, text, names)
    assert (stats.num_preemptions > 0) == (mode == "preempted")
    assert stats.num_free_blocks == stats.num_blocks


def test_a_file_in_a_chat_is_refused_by_name(listener):
    data = base64.b64encode(wav(clip("a"))).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    with (
        LLM(str(listener[1]), **SETTINGS) as llm,
        pytest.raises(UnsupportedFeature, match=r"input_audio\.data.*decodes no files"),
    ):
        llm.chat([{"role": "user", "content": [part]}], PARAMS, use_tqdm=False)


def test_without_recordings_text_alone_is_served(listener, wanted):
    with LLM(str(listener[1]), **SETTINGS, limit_mm_per_prompt={"audio": 0}) as llm:
        [output] = llm.generate(["in the race"], PARAMS, use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="this model takes text only"):
            llm.generate([asked("[AUDIO]", "a")], PARAMS, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == wanted[3]
