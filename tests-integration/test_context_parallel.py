"""Ranks that keep a part of the tokens each (decode context parallelism) give what one process gives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, save_model
from keys_over_ranks import attended
from modes import PROMPTS
from modes import SETTINGS as ROOMY
from posted import post
from servers import serving
from together import together

from headrace import LLM, SamplingParams
from headrace.assembly.parallel.context_parallel import share_blocks
from headrace_core.errors import ConfigError
from headrace_core.kv import FullAttentionSpec, SlidingWindowSpec, SparseIndexerSpec
from headrace_core.parallel import SingleProcess
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import same_bits
from headrace_testing.engine.rank_processes import RankProcesses
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
FIELD = "decode_context_parallel_size"
SHARED: dict[str, Any] = {"tensor_parallel_size": 2, FIELD: 2}
SETTINGS = {**ROOMY, "max_model_len": 80, "kv_cache_memory_bytes": 13 << 12}
"""With few blocks, for which requests are preempted."""
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
def whole(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS, **SHARED, **SMALL) as llm:
        yield llm


def said(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of each prompt's completion."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [(t, entry[t].logprob) for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


def agree(
    left: list[list[tuple[int, float]]],
    right: list[list[tuple[int, float]]],
    tolerance: float = 1e-4,
) -> None:
    assert [[t for t, _ in one] for one in left] == [[t for t, _ in one] for one in right]
    for one, other in zip(left, right, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=tolerance)


def test_two_ranks_say_what_one_process_says(whole: LLM, shared: LLM) -> None:
    alone = [said(shared, [prompt])[0] for prompt in PROMPTS]
    agree(alone, said(whole, PROMPTS))
    before = shared.engine.stats().num_preemptions
    with together(shared, len(PROMPTS)):
        batched = said(shared, PROMPTS)
    stats = shared.engine.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_blocks
    assert batched == alone, "bits do not depend on batches, chunks, hits and preemptions"
    assert said(shared, PROMPTS) == alone, "nor on the run"


def test_the_same_memory_holds_twice_the_tokens(whole: LLM, shared: LLM) -> None:
    """Two ranks with pages of 8 tokens: blocks of 16."""
    own, both = whole.engine.stats(), shared.engine.stats()
    assert (own.num_blocks, both.num_blocks) == (12, 12)
    assert (own.block_size, both.block_size) == (8, 16)


def test_cached_beginnings_are_of_blocks_of_both_ranks(shared: LLM) -> None:
    shared.reset_prefix_cache()
    [first] = shared.generate([PROMPTS[6]], GREEDY, use_tqdm=False)
    [second] = shared.generate([PROMPTS[6]], GREEDY, use_tqdm=False)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_runs_of_tokens_small_numbers_guesses_and_another_communicator(folder: Path) -> None:
    """Guesses are checked several tokens at once. Small numbers are rounded of what differs by a rounding."""
    settings = {**ROOMY, "kv_cache_dtype": "int8_per_token_head"}
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
               "prompt_lookup_min": 1}  # fmt: skip
    with LLM(str(folder), **settings) as llm:
        expected = said(llm, PROMPTS)
    settings |= {**SHARED, "cp_kv_cache_interleave_size": 4, "communicator": "gloo"}
    with LLM(str(folder), **settings, speculative_config=guesses) as llm:
        agree(said(llm, PROMPTS), expected, 2e-3)


def test_latent_attention(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path)
    with LLM(str(tmp_path), **ROOMY) as llm:
        expected = said(llm, PROMPTS)
    with LLM(str(tmp_path), **ROOMY, **SHARED, **SMALL, num_gpu_blocks_override=13) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        with together(llm, len(PROMPTS)):
            batched = said(llm, PROMPTS)
        assert llm.engine.stats().num_preemptions
    agree(alone, expected)
    assert batched == alone


RECORDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one head": ("llama", {"num_key_value_heads": 1}, {}),
    "latent": ("deepseek_v3", {}, {"cp_kv_cache_interleave_size": 4}),
    "in pairs": ("llama", {}, {"tensor_parallel_size": 4}),
    "stages": ("llama", {"num_key_value_heads": 1}, {"pipeline_parallel_size": 2}),
}
"""Family, changes of its config, settings."""


@pytest.mark.parametrize("kind", todays(RECORDED, days=2))
def test_recorded_steps_give_the_bits_of_eager_ones(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts in parts, alone and beside requests that decode; none of the steps runs eagerly."""
    family, changes, settings = RECORDED[kind]
    name, config = FAMILIES[family]
    save_model(family, tmp_path, {family: (name, {**config, **changes})})
    found = []
    for eager in (True, False):
        caplog.clear()
        own = {**ROOMY, **SHARED, **SMALL, **settings, "enforce_eager": eager}
        with caplog.at_level(logging.INFO), LLM(str(tmp_path), **own) as llm:
            found.append([said(llm, PROMPTS[:1]), said(llm, PROMPTS), said(llm, PROMPTS[2:5])])
        assert any("captured steps" in line for line in caplog.messages) is not eager
    assert found[0] == found[1]


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
        (
            {"speculative_config": {"method": "medusa", "model": "x", "num_speculative_tokens": 1}},
            "layers that guess",
        ),
    ],
    ids=str,
)
def test_settings_are_refused_by_name(folder: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(str(folder), **{**SETTINGS, **SHARED, **changes})


def test_too_few_copies_are_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, num_key_value_heads=2)
    with pytest.raises(ValueError, match=rf"{FIELD} = 2: .*is kept by 1 of the ranks"):
        LLM(str(tmp_path), **SETTINGS, **SHARED)


class FakeModel:
    """A model of one layer, as far as sharing blocks asks."""

    def __init__(self, **layer: Any) -> None:
        self.layer = SimpleNamespace(**layer)

    def attention_layers(self) -> dict[str, Any]:
        return {"layer": self.layer}


class FakeHybrid(FakeModel):
    def state_layers(self) -> dict[str, Any]:
        return {"state": None}


FULL = FullAttentionSpec(8, 1, 16, "float32")


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (FakeHybrid(kv_spec=FULL, kv_copies=2), "'state' keeps a state"),
        (FakeModel(kv_spec=SlidingWindowSpec(8, 1, 16, "float32", sliding_window=9), kv_copies=2), "Window"),
        (FakeModel(kv_spec=SparseIndexerSpec(8, 1, 16, "float32"), kv_copies=2), "SparseIndexer"),
        (FakeModel(kv_spec=None), "names no layers"),
        (FakeModel(kv_spec=FULL), "does not say how many ranks"),
        (FakeModel(kv_spec=FULL, kv_copies=3), "kept by 3 of the ranks"),
    ],
    ids=["state", "window", "indexer", "nothing", "unsaid", "copies"],
)  # fmt: skip
def test_models_are_refused_by_what_they_have(model: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        share_blocks(model, 2)
    assert error.value.field == f"parallel.{FIELD}"


def test_blocks_are_shared() -> None:
    model = FakeModel(kv_spec=FULL, kv_copies=4)
    share_blocks(model, 2)  # type: ignore[arg-type]
    spec = model.layer.kv_spec
    assert (spec.block_size, spec.page_tokens, spec.page_bytes) == (16, 8, FULL.page_bytes)
