"""Engines that share experts check guesses, each its own, and give what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_heads import eagle3
from families import save_model
from modes import PROMPTS, SETTINGS
from mtp_heads import mtp
from shared_experts import SHARED
from test_expert_parallel import agree, said

from headrace import LLM
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

KINDS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {},
    "draft_model": {},
    "eagle3": {},
    "mtp": {"tensor_parallel_size": 2},
}
"""The draft model is a mixture, too, whose experts are whole in each engine; so are those of the layer that
predicts further tokens, in the last case, in which engines have two ranks."""


def made(kind: str, folder: Path) -> dict[str, Any]:
    """Make a checkpoint in ``base``; how it is guessed for."""
    config: dict[str, Any] = {"method": kind, "num_speculative_tokens": 3, "adaptive": False}
    (folder / "base").mkdir()
    if kind == "mtp":
        mtp("deepseek_v3", folder / "base")
        return config
    save_model("qwen3_moe", folder / "base")
    if kind == "draft_model":
        (folder / "draft").mkdir()
        save_model("mixtral", folder / "draft")
        config["model"] = str(folder / "draft")
    elif kind == "eagle3":
        eagle3(folder / "draft")
        config["model"] = str(folder / "draft")
    return config


@pytest.mark.parametrize("kind", todays(KINDS, days=3))
def test_guesses_change_no_token(kind: str, tmp_path: Path) -> None:
    """Engines run different numbers of passes, of different shapes; one at a time has work, or all."""
    own = dict(KINDS[kind])
    ranks = {"tensor_parallel_size": own.pop("tensor_parallel_size", 1)}
    config = {**made(kind, tmp_path), **own}
    base = str(tmp_path / "base")
    with LLM(base, **SETTINGS) as llm:
        expected = said(llm, PROMPTS)
    shared = {**SHARED, **ranks, "num_gpu_blocks_override": 160}
    with LLM(base, **SETTINGS, **shared, speculative_config=config) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        batched = said(llm, PROMPTS)
        assert said(llm, PROMPTS) == batched == alone
        checked = llm.engine.stats().by_engine
        assert min(one.num_draft_tokens for one in checked) > 0
    agree(batched, expected)
