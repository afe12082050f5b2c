"""Measuring what guesses a speculative config makes for a model, and what they are worth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from demo_model.answers import questions
from headrace import LLM, SamplingParams

_SEED = 1 << 20
"""Of the questions that are measured with: training draws others."""
_TEMPERATURES = (0.0, 0.7)


class _Run(NamedTuple):
    """Answers of one turn."""

    tokens: list[list[int]]
    seconds: float
    drafts: int
    right: list[int]
    """Guesses that were right, by position."""


def measure(
    configs: Mapping[str, Mapping[str, Any]], *, count: int, rounds: int, model: Path | None = None
) -> None:
    """Print acceptance and speed on questions that were not trained on.

    Configs take turns, each in an engine of its own: one without guesses first, then each of ``configs`` with
    all of its guesses, and as many as pay.

    Args:
        configs: speculative configs by name.
        count: questions, one after the other.
        rounds: turns of each.
        model: folder; None: the demo model.
    """
    variants: dict[str, dict[str, Any] | None] = {"none": None}
    for name, config in configs.items():
        variants |= {f"{name}, all": {**config, "adaptive": False}, f"{name}, adaptive": {**config}}
    prompts = questions(_SEED, count)
    found: dict[tuple[str, float], list[_Run]] = {}
    for _ in range(rounds):
        for name, config in variants.items():
            settings = {} if config is None else {"speculative_config": config}
            path = {} if model is None else {"model": str(model)}
            threads = torch.get_num_threads()
            with LLM(max_model_len=1024, num_threads=threads, **path, **settings) as llm:
                for temperature in _TEMPERATURES:
                    runs = found.setdefault((name, temperature), [])
                    runs.append(_answered(llm, prompts, temperature))
                    if len(runs) == rounds:
                        told = _told(runs, found["none", temperature])
                        print(f"{name}, temperature {temperature:g}: {told}", flush=True)


def _answered(llm: LLM, prompts: Sequence[str], temperature: float) -> _Run:
    params = SamplingParams(temperature=temperature, max_tokens=160, seed=1)
    llm.generate(prompts[:1], params, use_tqdm=False)
    before, start = llm.engine.stats(), perf_counter()
    tokens = [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    seconds, after = perf_counter() - start, llm.engine.stats()
    earlier = before.num_accepted_per_position
    earlier += [0] * (len(after.num_accepted_per_position) - len(earlier))
    right = [a - b for a, b in zip(after.num_accepted_per_position, earlier, strict=True)]
    return _Run(tokens, seconds, after.num_drafts - before.num_drafts, right)


def _told(runs: Sequence[_Run], base: Sequence[_Run]) -> str:
    rates = [sum(map(len, run.tokens)) / run.seconds for run in runs]
    ratios = [
        b.seconds / run.seconds * sum(map(len, run.tokens)) / sum(map(len, b.tokens))
        for run, b in zip(runs, base, strict=True)
    ]
    line = f"{statistics.median(rates):.0f} tokens/s, {statistics.median(ratios):.2f} x"
    if len(ratios) > 1:
        line += f" ({min(ratios):.2f}-{max(ratios):.2f})"
    line += f"; the same answers: {runs[0].tokens == base[0].tokens}"
    drafts = sum(run.drafts for run in runs)
    if drafts:
        right = [sum(position) for position in zip(*(run.right for run in runs))]
        line += f"; right by position {', '.join(f'{n / drafts:.0%}' for n in right)}"
        line += f"; {1 + sum(right) / drafts:.2f} tokens in each of {drafts} steps with guesses"
    return line
