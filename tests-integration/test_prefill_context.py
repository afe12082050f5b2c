"""Ranks that divide the tokens of prompts (prefill context parallelism) give what one process gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB_SIZE, save_model
from modes import SETTINGS as ROOMY
from test_context_parallel import agree, said
from together import together

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.days(3)

FIELD = "prefill_context_parallel_size"
SETTINGS = {**ROOMY, "max_model_len": 256}
FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 46}
"""Enough for one of the longest requests, not for all: some are preempted."""
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)


def _prompts() -> list[list[int]]:
    """Long ones, of which two begin alike, and short ones beside them."""
    generator = torch.Generator().manual_seed(11)

    def draw(length: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()

    shared = draw(48)
    return [draw(3), shared + draw(150), draw(137), draw(40), shared + draw(133), draw(1)]


PROMPTS = _prompts()


def divided_passes(llm: LLM) -> list[int]:
    """By rank: passes of which it computed a part."""
    return [int(report["divided_passes"]) for report in llm.collective_rpc("report")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """What one process says."""
    with LLM(str(folder), **SETTINGS) as llm:
        return said(llm, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS, **FEW_BLOCKS, prefill_context_parallel_size=2) as llm:
        yield llm


def test_two_ranks_say_the_bits_of_one_process(pair: LLM, expected: Any) -> None:
    assert [said(pair, [prompt], GREEDY)[0] for prompt in PROMPTS] == expected
    before, divided = pair.engine.stats().num_preemptions, divided_passes(pair)
    assert divided[0] > 0
    assert divided[0] == divided[1]
    pair.reset_prefix_cache()
    with together(pair, len(PROMPTS)):
        batched = said(pair, PROMPTS, GREEDY)
    stats = pair.engine.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_blocks
    assert batched == expected
    assert said(pair, PROMPTS, GREEDY) == expected, "nor do they depend on the run"
    assert divided_passes(pair)[0] > divided[0]


def test_what_follows_a_prefix_that_is_cached_is_divided(pair: LLM, expected: Any) -> None:
    pair.reset_prefix_cache()
    assert said(pair, [PROMPTS[1]], GREEDY) == [expected[1]]
    divided = divided_passes(pair)[0]
    [hit] = pair.generate([PROMPTS[4]], GREEDY, use_tqdm=False)
    assert hit.num_cached_tokens == 48
    assert divided_passes(pair)[0] > divided
    [output] = hit.outputs
    scores = [e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True)]
    assert [*zip(output.token_ids, scores, strict=True)] == expected[4]


def test_prompts_in_parts_and_their_log_probabilities(folder: Path) -> None:
    """Chunks begin within blocks; log-probabilities of prompts need every rank's rows."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)

    def scores(llm: LLM) -> list[list[float]]:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [
            [entry[t].logprob for t, entry in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:])]
            for o in outputs
        ]

    with LLM(str(folder), **SETTINGS) as llm:
        whole = scores(llm)
    parts = {"max_num_batched_tokens": 133, "async_scheduling": False, "communicator": "gloo"}
    with LLM(str(folder), **SETTINGS, **parts, prefill_context_parallel_size=3) as llm:
        assert scores(llm) == whole
        assert divided_passes(llm) == [divided_passes(llm)[0]] * 3


def test_two_by_two_ranks(folder: Path, expected: Any) -> None:
    """Layers are divided over two ranks, prompts over two such pairs."""
    layout = {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}
    with LLM(str(folder), **SETTINGS, **FEW_BLOCKS, **layout) as llm:
        alone = [said(llm, [prompt], GREEDY)[0] for prompt in PROMPTS]
        agree(alone, expected)
        assert min(divided_passes(llm)) > 0
        llm.reset_prefix_cache()
        with together(llm, len(PROMPTS)):
            assert said(llm, PROMPTS, GREEDY) == alone
        assert llm.engine.stats().num_preemptions
    with LLM(str(folder), **SETTINGS, **layout) as llm:
        assert said(llm, PROMPTS, GREEDY) == alone


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                           "prompt_lookup_max": 2, "prompt_lookup_min": 1}}),
        ("deepseek_v3", {}),
        ("qwen3_moe", {"quantization": "int8", "kv_cache_dtype": "int8_per_token_head"}),
    ],
)  # fmt: skip
def test_windows_latent_attention_mixtures_and_small_numbers(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_model(family, tmp_path)
    with LLM(str(tmp_path), **SETTINGS, **settings) as llm:
        whole = said(llm, PROMPTS[1:4], GREEDY)
    with LLM(str(tmp_path), **SETTINGS, **settings, prefill_context_parallel_size=2) as llm:
        assert said(llm, PROMPTS[1:4], GREEDY) == whole
        assert divided_passes(llm)[0] > 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({FIELD: 65}, "in 1..64"),
        ({"pipeline_parallel_size": 2}, "1 with pipeline_parallel_size above 1"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
         "1 with decode_context_parallel_size above 1"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel true"),
        ({"distributed_executor_backend": "ray"}, "'ray'"),
        ({"enable_lora": True}, "enable_lora"),
        ({"model_impl": "transformers"}, "code of transformers"),
        ({"speculative_config": {"method": "medusa", "model": "x", "num_speculative_tokens": 1}},
         "speculative_config with a model or heads"),
        ({"kv_transfer_config": {"kv_connector": "file", "kv_role": "kv_both",
                                 "kv_connector_extra_config": {"shared_storage_path": "blocks"}}},
         "prefill_context_parallel_size above 1"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_are_refused_by_name(folder: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(str(folder), **{**SETTINGS, FIELD: 2, **changes})


def test_layers_with_states_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_model("lfm2", tmp_path)
    with pytest.raises(ValueError, match=rf"{FIELD}: must be 1 .*keeps a state"):
        LLM(str(tmp_path), **SETTINGS, prefill_context_parallel_size=2)
