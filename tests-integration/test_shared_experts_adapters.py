"""Engines that share experts have adapters of all other layers, and give what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora_over_ranks import ONE, PARAMS, Said, agree, made
from modes import PROMPTS
from shared_experts import SHARED

from headrace import LLM, LoRARequest
from headrace_core.errors import HeadraceError
from headrace_testing.model.adapters import write_adapter
from headrace_testing.sampling import todays

pytestmark = pytest.mark.days(3)

LAYOUTS: dict[str, dict[str, Any]] = {
    "engines of one rank": {},
    "engines of two ranks": {"tensor_parallel_size": 2, "fully_sharded_loras": True},
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")


def written(llm: LLM, adapters: list[LoRARequest | None]) -> Said:
    """Tokens and log-probabilities of all prompts, each with the next of the adapters."""
    chosen = [adapters[index % len(adapters)] for index in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=chosen, use_tqdm=False)
    return [
        [(t, e[t].logprob) for t, e in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
        for o in outputs
    ]  # fmt: skip


@pytest.mark.parametrize("layout", todays(LAYOUTS, days=2))
def test_adapters_come_to_every_engine(layout: str, tmp_path: Path) -> None:
    """Requests with different adapters, and without one, in both engines; three adapters in two slots."""
    case = made("qwen3_moe", tmp_path, TARGETS)
    mixed = [None, *case.adapters]
    with LLM(case.base, **ONE) as llm:
        expected = written(llm, mixed)
        assert len({str(written(llm, [adapter])[1]) for adapter in mixed}) == 4
    with LLM(case.base, **ONE, **SHARED, **LAYOUTS[layout]) as llm:
        found = written(llm, mixed)
        assert written(llm, mixed) == found
        assert min(one.generation_tokens for one in llm.engine.stats().by_engine) > 0
        refused(llm, tmp_path)
    agree(found, expected)


def refused(llm: LLM, folder: Path) -> None:
    """An adapter of an expert is refused by name, and the engines go on."""
    expert = {"model.layers.1.mlp.experts.2.gate_proj": (48, 64)}
    write_adapter(folder / "expert", expert, 4, 7)
    request = LoRARequest("expert", 9, str(folder / "expert"))
    with pytest.raises(HeadraceError, match=r"experts.*enable_expert_parallel"):
        llm.llm_engine.add_lora(request)
    assert llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
