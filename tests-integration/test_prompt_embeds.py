"""Prompts as embeddings: the bits of the tokens' own, in every family and mode."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from families import FAMILIES, save_model
from safetensors.torch import save
from together import together

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError, RequestError, UnsupportedFeature

SETTINGS = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 8, "num_threads": 1,
    "kv_cache_memory_bytes": 16 << 20, "enable_prompt_embeds": True, "block_size": 8,
}  # fmt: skip
PROMPTS = [[5, 9, 200, 31] * 9, [77, 3, 3, 140, 8, 61, 19, 250, 4], [300]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=4)


READ_IDS = {"gemma4"}
"""Families with layers that look up the tokens' ids themselves."""


def results(outputs):
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def vectors(oracle, prompt):
    with torch.inference_mode():
        return oracle.get_input_embeddings()(torch.tensor(prompt)).clone()


@pytest.mark.keep(8, every_value=False)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in READ_IDS])
def test_embeddings_of_transformers_give_the_bits_of_the_tokens(family, tmp_path):
    oracle = save_model(family, tmp_path)
    embedded = [{"prompt_embeds": vectors(oracle, prompt)} for prompt in PROMPTS]
    with LLM(str(tmp_path), **SETTINGS, enable_prefix_caching=False) as llm:
        wanted = results(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert results(llm.generate(embedded, PARAMS, use_tqdm=False)) == wanted
        mixed = [PROMPTS[0], embedded[1], PROMPTS[2], embedded[0], PROMPTS[1], embedded[2]]
        got = results(llm.generate(mixed, PARAMS, use_tqdm=False))
        assert got == [wanted[i] for i in (0, 1, 2, 0, 1, 2)]


@pytest.mark.parametrize("family", sorted(READ_IDS))
def test_models_that_look_up_ids_refuse(family, tmp_path):
    save_model(family, tmp_path)
    with pytest.raises(ConfigError, match="enable_prompt_embeds = True: must be False"):
        LLM(str(tmp_path), **SETTINGS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeds")
    return save_model("llama", folder), str(folder)


MODES = {
    "chunks": {"max_num_batched_tokens": 8},
    "preempted": {"num_gpu_blocks_override": 10, "kv_cache_memory_bytes": None},
    "eager": {"enforce_eager": True},
    "two processes": {"engine_process": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_and_the_prefix_cache(checkpoint, mode):
    oracle, folder = checkpoint
    long = [*PROMPTS[0], 7, 8, 9]
    prompts = [*PROMPTS, long]
    embedded = [{"prompt_embeds": vectors(oracle, prompt)} for prompt in prompts]
    with LLM(folder, **{**SETTINGS, "max_model_len": 64}) as llm:
        wanted = results(llm.generate(prompts, PARAMS, use_tqdm=False))
    with LLM(folder, **{**SETTINGS, "max_model_len": 64, **MODES[mode]}) as llm:
        with together(llm, len(embedded)) if mode == "preempted" else contextlib.nullcontext():
            assert results(llm.generate(embedded, PARAMS, use_tqdm=False)) == wanted
        if mode == "preempted":
            assert llm.engine.stats().num_preemptions > 0
            return
        [again, tokens] = llm.generate([embedded[3], long], PARAMS, use_tqdm=False)
        assert results([again, tokens]) == [wanted[3]] * 2
        assert again.num_cached_tokens == 32, "blocks of embeddings are found by content"
        assert tokens.num_cached_tokens == 0, "and are none of tokens"
        other = embedded[3]["prompt_embeds"].clone()
        other[20] += 1
        [changed] = llm.generate({"prompt_embeds": other}, PARAMS, use_tqdm=False)
        assert changed.num_cached_tokens == 16


def test_files_of_both_kinds_and_refusals(checkpoint):
    oracle, folder = checkpoint
    rows = vectors(oracle, PROMPTS[1])
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    with LLM(folder, **SETTINGS, engine_process=True) as llm:
        wanted = results(llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False))
        files = [{"prompt_embeds": data} for data in (buffer.getvalue(), save({"x": rows}))]
        assert results(llm.generate(files, PARAMS, use_tqdm=False)) == wanted * 2
        for bad in (rows[:, :-1], rows * torch.nan, b"hello"):
            with pytest.raises(RequestError, match="prompt_embeds"):
                llm.generate({"prompt_embeds": bad}, PARAMS, use_tqdm=False)
        assert results(llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False)) == wanted
    with (
        LLM(folder, **{**SETTINGS, "enable_prompt_embeds": False}) as llm,
        pytest.raises(UnsupportedFeature, match="--enable-prompt-embeds"),
    ):
        llm.generate({"prompt_embeds": rows}, PARAMS, use_tqdm=False)
