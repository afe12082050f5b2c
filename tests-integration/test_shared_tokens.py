"""Ranks that share the tokens of large steps between layers (sequence parallelism) give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB_SIZE, save_model
from modes import SETTINGS
from test_context_parallel import said

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.days(3)

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
RANKS: dict[str, Any] = {**SETTINGS, "max_model_len": 1200, "tensor_parallel_size": 2}


def test_large_steps_are_shared_and_give_the_same_bits(tmp_path: Path) -> None:
    kind, sizes = FAMILIES["llama"]
    save_model("llama", tmp_path, {"llama": (kind, {**sizes, "max_position_embeddings": 1200})})
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1101, 50)]
    with LLM(str(tmp_path), **RANKS) as llm:
        whole = said(llm, prompts, GREEDY)
        assert "shared_passes" not in llm.collective_rpc("report")[0]
    with LLM(str(tmp_path), **RANKS, enable_sp=True) as llm:
        assert said(llm, prompts, GREEDY) == whole
        assert [report["shared_passes"] for report in llm.collective_rpc("report")] == ["1", "1"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel_size = 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size above 1"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"parallel.enable_sp = True: .*{match}"):
        LLM(str(tmp_path), **{**RANKS, "enable_sp": True, **changes})


def test_models_of_other_blocks_are_refused(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    with pytest.raises(ValueError, match=r"enable_sp = True: .*layer 0 has a"):
        LLM(str(tmp_path), **{**RANKS, "max_model_len": 128}, enable_sp=True)
