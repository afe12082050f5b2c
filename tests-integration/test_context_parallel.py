"""Ranks that keep a part of the tokens each (decode context parallelism) give what one process gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save_model
from keys_over_ranks import attended
from modes import PROMPTS, SETTINGS
from posted import post
from servers import serving
from together import together

from headrace import LLM, SamplingParams
from headrace_core.parallel import SingleProcess
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import same_bits
from headrace_testing.engine.rank_processes import RankProcesses

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
FIELD = "decode_context_parallel_size"
SHARED: dict[str, Any] = {"tensor_parallel_size": 2, FIELD: 2}
SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 7}
"""Steps in which prompts are computed in parts."""


def save_llama(folder: Path, **changes: Any) -> Path:
    save_model("llama", folder, {"llama": ("LlamaConfig", {**FAMILIES["llama"][1], **changes})})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose one key-value head two ranks would keep copies of."""
    return save_llama(tmp_path_factory.mktemp("llama"), num_key_value_heads=1)


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[tuple[int, float]]]:
    with LLM(str(folder), **SETTINGS) as llm:
        return said(llm, PROMPTS)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    """With few blocks, for which requests are preempted."""
    with LLM(str(folder), **SETTINGS, **SHARED, **SMALL, num_gpu_blocks_override=13) as llm:
        yield llm


def said(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of each prompt's completion."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [(t, entry[t].logprob) for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


def agree(left: list[list[tuple[int, float]]], right: list[list[tuple[int, float]]]) -> None:
    assert [[t for t, _ in one] for one in left] == [[t for t, _ in one] for one in right]
    for one, other in zip(left, right, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)


def test_two_ranks_say_what_one_process_says(whole: Any, shared: LLM) -> None:
    alone = [said(shared, [prompt])[0] for prompt in PROMPTS]
    agree(alone, whole)
    before = shared.engine.stats().num_preemptions
    with together(shared, len(PROMPTS)):
        batched = said(shared, PROMPTS)
    stats = shared.engine.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_blocks
    assert batched == alone, "bits do not depend on batches, chunks, hits and preemptions"
    assert said(shared, PROMPTS) == alone, "nor on the run"


def test_cached_beginnings_are_of_blocks_of_all_ranks(shared: LLM) -> None:
    """Two ranks with pages of 8 tokens: blocks of 16."""
    shared.reset_prefix_cache()
    assert shared.engine.stats().block_size == 16
    [first] = shared.generate([PROMPTS[6]], GREEDY, use_tqdm=False)
    [second] = shared.generate([PROMPTS[6]], GREEDY, use_tqdm=False)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_the_same_memory_holds_twice_the_tokens(folder: Path, shared: LLM) -> None:
    tokens = []
    for size in (1, 2):
        settings = {**SETTINGS, **SHARED, FIELD: size, "kv_cache_memory_bytes": 1 << 20}
        with LLM(str(folder), **settings) as llm:
            stats = llm.engine.stats()
            tokens.append((stats.num_blocks + 1) * stats.block_size)
    assert tokens[1] == 2 * tokens[0]


def test_runs_of_tokens_guesses_and_another_communicator(folder: Path, whole: Any) -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
               "prompt_lookup_min": 1}  # fmt: skip
    settings = {**SETTINGS, **SHARED, "cp_kv_cache_interleave_size": 4}
    with LLM(str(folder), **settings, speculative_config=guesses, communicator="gloo") as llm:
        agree(said(llm, PROMPTS), whole)


def test_one_byte_caches(folder: Path) -> None:
    settings = {**SETTINGS, "kv_cache_dtype": "int8_per_token_head"}
    with LLM(str(folder), **settings) as llm:
        expected = said(llm, PROMPTS)
    with LLM(str(folder), **settings, **SHARED) as llm:
        agree(said(llm, PROMPTS), expected)


def test_latent_attention(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = said(llm, PROMPTS)
    with LLM(str(tmp_path), **SETTINGS, **SHARED, **SMALL, num_gpu_blocks_override=13) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        with together(llm, len(PROMPTS)):
            batched = said(llm, PROMPTS)
        assert llm.engine.stats().num_preemptions
    agree(alone, expected)
    assert batched == alone


def test_four_ranks_in_pairs_served() -> None:
    """Two key-value heads, two ranks for each."""
    body = {"model": "demo", "temperature": 0, "max_tokens": 24, "logprobs": True,
            "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}  # fmt: skip
    with LLM(dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
        [expected] = llm.chat(body["messages"], params, use_tqdm=False)
    [output] = expected.outputs
    words = ("-tp", "4", "-dcp", "2", "--dtype", "float32", "--served-model-name", "demo")
    with serving(*words) as server:
        [choice] = post(f"{server.api}/chat/completions", body)["choices"]
    assert choice["message"]["content"] == output.text
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    wanted = [e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)]
    assert found == pytest.approx(wanted[: len(found)], abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleave", [1, 4])
def test_attention_over_two_processes(dtype: str, interleave: int) -> None:
    expected = attended(SingleProcess(), dtype, 1)
    with RendezvousServer() as server, RankProcesses("gloo", 2, server.address("dcp")) as ranks:
        first, second = ranks.on_every_rank(attended, dtype, interleave)
        again, _ = ranks.on_every_rank(attended, dtype, interleave)
    tolerance = 1e-5 if dtype == "float32" else 1.5e-2
    for one, other, whole in zip(first, second, expected, strict=True):
        together = torch.cat((one, other), dim=1)
        torch.testing.assert_close(together, whole, rtol=tolerance, atol=tolerance)
    assert all(same_bits(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({FIELD: 3}, "a divisor of tensor_parallel_size = 2"),
        ({FIELD: 1, "cp_kv_cache_interleave_size": 2}, "cp_kv_cache_interleave_size = 2"),
        ({"cp_kv_cache_interleave_size": 3}, "must divide cache.block_size = 8"),
        ({"speculative_config": {"method": "draft_model", "model": "x"}}, "layers that guess"),
        ({"attention_backend": "sdpa"}, "'sdpa'"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name(folder: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(str(folder), **{**SETTINGS, **SHARED, **changes})


def test_too_few_copies_are_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, num_key_value_heads=2)
    (tmp_path / "model.safetensors").write_bytes(b"")  # not read so far
    with pytest.raises(ValueError, match=rf"{FIELD} = 2: .*is kept by 1 of the ranks"):
        LLM(str(tmp_path), **SETTINGS, **SHARED)


@pytest.mark.parametrize(
    ("family", "match"),
    [("mistral", "sliding window"), ("mamba2", "state"), ("glm_moe_dsa", "sparse")],
)
def test_models_are_refused_by_what_they_have(family: str, match: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    with pytest.raises(ValueError, match=rf"{FIELD} = 2.*{match}"):
        LLM(str(tmp_path), **SETTINGS, **SHARED)
