"""Whole experts divided over processes give what one process gives, wherever they are and while they move."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import save_model
from modes import PROMPTS, SETTINGS
from posted import post
from servers import RunningServer, serving
from test_mxfp4 import make_checkpoints
from together import together

from headrace import LLM, SamplingParams
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
DIVIDED: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 7,
}
MOVING: dict[str, Any] = {
    "enable_eplb": True,
    "eplb_config": {"window_size": 6, "step_interval": 12, "num_redundant_experts": 2},
}


def said(llm: LLM, prompts: Any) -> list[list[tuple[int, float]]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [
        [(t, entry[t].logprob) for t, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]


def agree(left: Any, right: Any, tolerance: float = 1e-4) -> None:
    assert [[t for t, _ in one] for one in left] == [[t for t, _ in one] for one in right]
    for one, other in zip(left, right, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=tolerance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_model("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[tuple[int, float]]]:
    with LLM(str(folder), **SETTINGS) as llm:
        return said(llm, PROMPTS)


def test_two_ranks_say_what_one_says(folder: Path, whole: Any) -> None:
    """Six experts, three on each rank; requests are cut, batched and preempted."""
    few = {**DIVIDED, "num_gpu_blocks_override": 24}
    with LLM(str(folder), **SETTINGS, **few) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        before = llm.engine.stats().num_preemptions
        with together(llm, len(PROMPTS)):
            batched = said(llm, PROMPTS)
        assert llm.engine.stats().num_preemptions > before
        assert said(llm, PROMPTS) == batched
    agree(alone, whole)
    assert batched == alone


def check(folder: Path, prompts: Any, settings: dict[str, Any], divided: dict[str, Any]) -> None:
    with LLM(str(folder), **settings) as llm:
        expected = said(llm, prompts)
    with LLM(str(folder), **settings, **DIVIDED | divided) as llm:
        alone = said(llm, prompts[-1:])
        batched = said(llm, prompts)
    agree(batched, expected)
    if not divided.get("enable_eplb"):
        assert batched[-1:] == alone


FOUR = {"tensor_parallel_size": 4, "expert_placement_strategy": "round_robin"}
KINDS: dict[str, dict[str, Any]] = {"deepseek_v3": {}, "mixtral": FOUR, "qwen3_next": {}}
"""Latent attention and routing by groups; four ranks of one expert each; a shared expert with a gate."""


@pytest.mark.parametrize("kind", todays(KINDS, days=3))
def test_families_and_more_ranks(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    check(tmp_path, PROMPTS, SETTINGS, KINDS[kind])


STORED = {"floats": {}, "mxfp4": {}, "rounded": {"quantization": "experts_int8"}}


@pytest.mark.parametrize("stored", todays(STORED, days=3))
def test_gpt_oss(tmp_path: Path, stored: str) -> None:
    """Experts with biases, in floats, in 4 bits, and rounded while they are loaded: each is whole on its
    rank, so that it is rounded as with one rank. Those in 4 bits move."""
    path = make_checkpoints(tmp_path)[stored == "mxfp4"]
    settings = {**SETTINGS, "quantization_activations": "float", **STORED[stored]}
    prompts = [[token % 131 for token in prompt] for prompt in PROMPTS]
    check(path, prompts, settings, MOVING if stored == "mxfp4" else {})


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("copies", todays((0, 2), days=2))
def test_moving_experts_changes_no_token(
    folder: Path, whole: Any, copies: int, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**MOVING["eplb_config"], "num_redundant_experts": copies, "log_balancedness": True,
              "use_async": beside}  # fmt: skip
    settings = {**DIVIDED, "enable_eplb": True, "eplb_config": config}
    with caplog.at_level(logging.INFO), LLM(str(folder), **SETTINGS, **settings) as llm:
        for _ in range(3):
            agree(said(llm, PROMPTS), whole)
    lines = [r.getMessage() for r in caplog.records]
    moved = [line for line in lines if line.startswith("experts moved")]
    assert len(moved) >= (2 if beside else 3)
    for line in moved:
        after, before = (float(word.strip(",")) for word in line.split() if word[0] in "01")
        assert after >= before - 1e-6
    assert sum("busiest rank" in line for line in lines) > 12 * (len(moved) - 1 - beside)
    captured = [line for line in lines if line.startswith("captured steps")]
    assert bool(captured) == (not copies)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    words = ["--model", str(folder), "--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "128",
             "-tp", "2", "-ep", "--enable-eplb", "--eplb-config", json.dumps(MOVING["eplb_config"]),
             "--served-model-name", "mixture", "--kv-cache-memory-bytes", "32m", "--block-size", "8"
             ]  # fmt: skip
    with serving(*words) as running:
        yield running


def test_served(server: RunningServer, whole: Any) -> None:
    for prompt, expected in zip(PROMPTS, whole, strict=True):
        body = {"model": "mixture", "prompt": prompt, "max_tokens": 12, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        [choice] = post(f"{server.api}/completions", body)["choices"]
        assert choice["token_ids"] == [token for token, _ in expected]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tensor_parallel_size": 1}, "parallel.enable_expert_parallel.*tensor_parallel_size = 1"),
        ({"enable_expert_parallel": False, "enable_eplb": True}, "parallel.enable_eplb"),
        ({"all2all_backend": "deepep_low_latency"}, "parallel.all2all_backend.*library for GPUs"),
        ({"all2all_backend": "naive"}, "parallel.all2all_backend.*all have them"),
        ({"eplb_config": {"window_size": 9}}, "parallel.eplb_config.*enable_eplb"),
        ({"enable_eplb": True, "eplb_config": {"use_async": "x"}}, "eplb_config.use_async"),
        ({"enable_eplb": True, "eplb_config": {"policy": "other"}}, "'other'.*default"),
        (
            {"enable_eplb": True, "expert_placement_strategy": "round_robin"},
            "linear with enable_eplb",
        ),
        ({"model_impl": "transformers"}, "parallel.enable_expert_parallel.*transformers"),
    ],
)
def test_refused_by_name(folder: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, LookupError), match=text):
        LLM(str(folder), **{**SETTINGS, **DIVIDED, **settings})
