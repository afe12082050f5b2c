"""Adapters of engines with several ranks or stages, and what such an engine says with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from families import save_model
from modes import PROMPTS, SETTINGS
from together import together

from headrace import LLM, LoRARequest, SamplingParams
from headrace_testing.model.adapters import linear_modules, write_adapter

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
ONE = {**SETTINGS, "enable_lora": True, "max_loras": 2}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
RANKS = (5, 16, 8)
"""Of three adapters; no number of processes divides the first."""

Said = list[list[tuple[int, float]]]


class Case(NamedTuple):
    base: str
    adapters: list[LoRARequest]


def made(family: str, folder: Path, targets: tuple[str, ...]) -> Case:
    (folder / "base").mkdir()
    model = save_model(family, folder / "base")
    modules = {name: s for name, s in linear_modules(model).items() if name.endswith(targets)}
    for number, rank in enumerate(RANKS, 1):
        write_adapter(folder / f"adapter-{number}", modules, rank, number, scale=2.0)
    return Case(
        str(folder / "base"),
        [LoRARequest(f"adapter-{n}", n, str(folder / f"adapter-{n}")) for n in (1, 2, 3)],
    )


def said(llm: LLM, adapters: Sequence[LoRARequest | None]) -> Said:
    """Tokens and log-probabilities of all prompts, each with the next of the adapters, in one batch."""
    chosen = [adapters[i % len(adapters)] for i in range(len(PROMPTS))]
    for adapter in adapters:
        if adapter is not None:  # what is read first would hold the others up
            llm.llm_engine.add_lora(adapter)
    with together(llm, len(PROMPTS)):
        outputs = llm.generate(PROMPTS, PARAMS, lora_request=chosen, use_tqdm=False)
    return [
        [(t, e[t].logprob) for t, e in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)]
        for o in outputs
    ]  # fmt: skip


def agree(found: Said, wanted: Said) -> None:
    assert [[t for t, _ in one] for one in found] == [[t for t, _ in one] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)


def picked(case: Case, which: Sequence[int | None]) -> list[LoRARequest | None]:
    return [None if i is None else case.adapters[i] for i in which]
