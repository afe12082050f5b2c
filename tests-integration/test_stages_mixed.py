"""Stages whose ranks have whole experts each, or a part of the tokens' keys, say what one process says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, save_model
from modes import PROMPTS, SETTINGS
from posted import post
from servers import serving
from test_tensor_parallel import NUM_TOKENS, agree, said
from together import together

from headrace import LLM
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

STAGED: dict[str, Any] = {**SETTINGS, "pipeline_parallel_size": 2, "tensor_parallel_size": 2,
                          "max_num_batched_tokens": 32, "max_num_seqs": 7}  # fmt: skip
"""Small steps: prompts are computed in parts."""
KINDS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}, {"enable_expert_parallel": True, "num_gpu_blocks_override": 24}),
    "placed in turn": ("mixtral", {}, {"enable_expert_parallel": True, "num_gpu_blocks_override": 24,
                                       "expert_placement_strategy": "round_robin"}),
    "keys": ("llama", {"num_key_value_heads": 1},
             {"decode_context_parallel_size": 2, "num_gpu_blocks_override": 13}),
}  # fmt: skip
"""Family, changes of its config, settings with few blocks."""


@pytest.mark.parametrize("kind", todays(KINDS, days=3))
def test_two_stages_of_two_ranks_say_what_one_process_says(kind: str, tmp_path: Path) -> None:
    family, changes, settings = KINDS[kind]
    name, config = FAMILIES[family]
    save_model(family, tmp_path, {family: (name, {**config, **changes})})
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = said(llm, PROMPTS)
    with LLM(str(tmp_path), **STAGED, **settings) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        with together(llm, len(PROMPTS)):
            batched = said(llm, PROMPTS)
        assert llm.engine.stats().num_preemptions
        assert said(llm, PROMPTS) == batched, "bits do not depend on the run"
    agree(alone, expected)
    assert batched == alone, "nor on batches, chunks, hits and preemptions"


def test_experts_and_keys_of_stages_served(tmp_path: Path) -> None:
    """Latent attention, whose one vector both ranks of a stage would keep, and a mixture."""
    save_model("deepseek_v3", tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = said(llm, PROMPTS)
    words = ["--model", str(tmp_path), "--dtype", "float32", "--skip-tokenizer-init", "--block-size", "8",
             "--max-model-len", "128", "--kv-cache-memory-bytes", "32m", "--served-model-name", "mixture",
             "-pp", "2", "-tp", "2", "-dcp", "2", "-ep"]  # fmt: skip
    body = {"model": "mixture", "prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "logprobs": 0}  # fmt: skip
    with serving(*words) as server:
        choices = post(f"{server.api}/completions", body)["choices"]
    found = [
        list(zip(one["token_ids"], one["logprobs"]["token_logprobs"], strict=True))
        for one in sorted(choices, key=lambda one: one["index"])
    ]
    agree(found, expected)


MOVES: dict[str, Any] = {"window_size": 6, "step_interval": 12, "num_redundant_experts": 2}
MOVING: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], set[int]]] = {
    "recorded": ("qwen3_moe", {}, {"num_redundant_experts": 0}, {0, 1}),
    "beside steps": ("qwen3_moe", {"communicator": "gloo"}, {"use_async": True}, {0, 1}),
    "one stage without": ("deepseek_v3", {"async_scheduling": False}, {}, {1}),
}
"""Family, settings, those of moves, stages with mixtures."""


@pytest.mark.parametrize("kind", todays(MOVING, days=3))
def test_each_stage_moves_its_experts_and_changes_no_token(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Steps run beside each other, and each stage moves experts between the same two."""
    family, settings, config, stages = MOVING[kind]
    if len(stages) == 1:  # the first layer has no mixture
        monkeypatch.setenv("HEADRACE_PP_LAYER_PARTITION", "1,3")
    save_model(family, tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = said(llm, PROMPTS)
    moving = {"enable_expert_parallel": True, "enable_eplb": True,
              "eplb_config": {**MOVES, "log_balancedness": True, **config}}  # fmt: skip
    # Ranks log from the level that this process does.
    with (
        caplog.at_level(logging.INFO),
        LLM(str(tmp_path), **STAGED, **settings, **moving) as llm,
    ):
        for _ in range(3):
            agree(said(llm, PROMPTS), expected)
    lines = [*caplog.messages, *capfd.readouterr().err.splitlines()]
    moved, counted = (
        [sum(f"experts of stage {stage}{what}" in line for line in lines) for stage in (0, 1)]
        for what in (" moved", "' tokens")
    )
    assert [count >= 2 for count in moved] == [stage in stages for stage in (0, 1)], moved
    assert {count for count in counted if count} == {max(counted)}, "each counts each step"
    assert max(counted) > 24
