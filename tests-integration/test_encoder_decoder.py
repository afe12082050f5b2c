"""Encoder-decoder models in the whole engine: Whisper equals transformers' generate."""

from __future__ import annotations

import contextlib

import pytest
import torch
from listening import features, save_whisper, sound
from together import together

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError, UnsupportedFeature

SETTINGS = {
    "dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "block_size": 8,
    "kv_cache_memory_bytes": 16 << 20, "use_tqdm_on_load": False,
}  # fmt: skip
LENGTHS = (1.5, 0.3, 2.0, 0.9, 1.1, 0.02)
TEXT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
OTHER = "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
PARAMS = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    return save_whisper(folder), folder


@pytest.fixture(scope="module")
def wanted(whisper):
    """Tokens of each clip, by transformers: English transcripts, then German translations."""
    oracle, folder = whisper
    found = []
    for language, task in (("en", "transcribe"), ("de", "translate")):
        for seed, seconds in enumerate(LENGTHS):
            with torch.inference_mode():
                tokens = oracle.generate(
                    features(folder, sound(seed, seconds)), language=language, task=task,
                    max_new_tokens=20, do_sample=False,
                )  # fmt: skip
            found.append(tokens[0].tolist())
    assert len(set(map(tuple, found))) > len(LENGTHS), "the model hears differences"
    return found


def prompts():
    """Every clip in English and in German, in the two forms by turns."""
    found = []
    for text in (TEXT, OTHER):
        for seed, seconds in enumerate(LENGTHS):
            media = {"audio": (sound(seed, seconds), 16000)}
            implicit = {"prompt": text, "multi_modal_data": media}
            encoder = {"prompt": "", "multi_modal_data": media}
            explicit = {"encoder_prompt": encoder, "decoder_prompt": text}
            found.append(explicit if seed % 2 else implicit)
    return found


MODES = {
    "batched": {},
    "steps one by one": {"async_scheduling": False},
    "preempted": {"num_gpu_blocks_override": 44, "kv_cache_memory_bytes": None},
    "two requests at once": {"max_num_seqs": 2},
    "two processes": {"engine_process": True},
    "eager": {"enforce_eager": True},
}


@pytest.mark.spec("ENCDEC-PROMPT", "MODEL-ASR")
@pytest.mark.parametrize("mode", MODES)
def test_whisper_equals_generate_of_transformers(whisper, wanted, mode):
    with LLM(str(whisper[1]), **{**SETTINGS, **MODES[mode]}) as llm:
        every = prompts()
        with together(llm, len(every)) if mode == "preempted" else contextlib.nullcontext():
            outputs = llm.generate(every, PARAMS, use_tqdm=False)
        stats = llm.engine.stats()
    assert (stats.num_preemptions > 0) == (mode == "preempted")
    assert stats.num_free_blocks == stats.num_blocks
    assert [o.prompt for o in outputs] == [TEXT] * len(LENGTHS) + [OTHER] * len(LENGTHS)
    assert [list(o.outputs[0].token_ids) for o in outputs] == wanted
