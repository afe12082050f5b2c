"""Heads and draft models guess beside everything that a request may ask for: outputs are the same bits, up to
the last token that the context has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import constrained
import pytest
from draft_heads import eagle, eagle3, medusa, mlp_speculator

from headrace import LLM, SamplingParams
from headrace.sampling_params import StructuredOutputsParams

HEADS = {"eagle": eagle, "eagle3": eagle3, "mlp_speculator": mlp_speculator, "medusa": medusa}
SETTINGS = {**constrained.UNHURRIED, "max_model_len": 64, "max_num_seqs": 8}
FEW_BLOCKS = 20
"""Of eight tokens each: fewer than the requests of :data:`LONG` need together."""
LIST = {"type": "array", "items": {"enum": ["a", 1, True]}, "minItems": 3, "maxItems": 5}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy to the end": {"temperature": 0, "max_tokens": None},
    "samples to the end": {"temperature": 1.0, "seed": 5, "max_tokens": None, "n": 3},
    "log-probabilities": {"temperature": 0.8, "seed": 2, "logprobs": 4, "prompt_logprobs": 2},
    "json": {"temperature": 1.0, "seed": 1, "n": 2,
             "structured_outputs": StructuredOutputsParams(json=LIST)},
    "json that the context cuts": {"temperature": 1.0, "seed": 6, "max_tokens": None,
             "structured_outputs": StructuredOutputsParams(regex="(ab|cd){60}")},
    "choice": {"temperature": 1.0, "seed": 3, "structured_outputs": StructuredOutputsParams(
        choice=["true", "text about nothing"])},
    "penalties": {"temperature": 0.7, "seed": 4, "n": 2, "frequency_penalty": 0.5,
                  "logit_bias": {20: 2.0}},
    "one token": {"temperature": 0, "max_tokens": 1},
}  # fmt: skip
SHORT = ["a", '{"name": ']
LONG = [f"{index} free text about nothing, and numbers 10 20 30" for index in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    constrained.save(made)
    return made


def outputs(llm: LLM, name: str, prompts: list[str]) -> list[Any]:
    given = {"max_tokens": 20, "logprobs": 1, **PARAMS[name]}
    params = SamplingParams(ignore_eos="structured_outputs" not in given, **given)
    return [
        (one.token_ids, one.text, one.finish_reason,
         [{i: p.logprob.hex() for i, p in at.items()} for at in one.logprobs])
        for output in llm.generate(prompts, params, use_tqdm=False)
        for one in output.outputs
    ]  # fmt: skip


def found(folder: Path, **settings: Any) -> dict[str, list[Any]]:
    """By parameters: outputs with room for all, and where requests have to wait for each other's blocks."""
    with LLM(str(folder), **{**SETTINGS, **settings}) as llm:
        told = {name: outputs(llm, name, SHORT) for name in PARAMS}
    few = {"num_gpu_blocks_override": FEW_BLOCKS}
    with LLM(str(folder), **{**SETTINGS, **settings, **few}) as llm:
        for name in ("samples to the end", "json that the context cuts"):
            told[f"{name}, preempted"] = outputs(llm, name, LONG)
        told["preemptions"] = [llm.engine.stats().num_preemptions > 0]
    return told


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[Any]]:
    told = found(folder)
    assert told["preemptions"] == [True]
    assert {one[2] for one in told["greedy to the end"]} == {"length"}
    return told


@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_outputs_are_the_same_bits(
    folder: Path, plain: dict[str, list[Any]], method: str, tmp_path: Path
) -> None:
    if method in HEADS:
        HEADS[method](tmp_path / "head")
    model = str(tmp_path / "head") if method in HEADS else str(folder)
    settings = {"method": method, "model": model, "num_speculative_tokens": 3, "adaptive": False}
    told = found(folder, speculative_config=settings)
    assert [name for name in plain if told[name] != plain[name]] == []
