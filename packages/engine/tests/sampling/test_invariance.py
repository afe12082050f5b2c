"""A row's token and log-probabilities have the same bits in any batch (REL-15)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from headrace_core.sampling.params import SamplingParams

GREEDY, WARM = 0.0, 0.9
SETTINGS: list[dict[str, Any]] = [
    {"temperature": GREEDY},
    {"temperature": WARM},
    {"temperature": 1.7, "top_p": 0.9},
    {"temperature": WARM, "top_p": 0.35, "top_k": 900},
    {"temperature": WARM, "top_k": 40},
    {"temperature": WARM, "top_k": 3000, "top_p": 0.95},
    {"temperature": WARM, "min_p": 0.02},
    {"temperature": WARM, "min_p": 0.001, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": GREEDY, "frequency_penalty": 0.3, "logit_bias": {5: 1.0}},
    {"temperature": WARM, "allowed_token_ids": list(range(0, 4000, 7))},
    {"temperature": WARM, "presence_penalty": 1.0, "min_tokens": 9},
]


@pytest.fixture(params=[32, 1000, 5003])
def vocab_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.req("REL-15")
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("threads", [1, 2])
def test_any_batch_gives_the_same_bits(kit: Any, vocab_size: int, mode: str, threads: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    count = 3 * len(SETTINGS)
    logits = torch.randn(count, vocab_size, generator=generator) * 2.5
    logits[::4] = (logits[::4] * 4).round() / 4  # ties
    rows = [
        kit.Row(
            SamplingParams(seed=i, logprobs=i % 6, **fields),
            prompt=[1, 2, 3],
            output=[(i * j) % 30 for j in range(i % 5)],
            stop_token_ids=[4, 5],
            request_id=f"request {i}",
        )
        for i, fields in enumerate(itertools.islice(itertools.cycle(SETTINGS), count))
    ]

    def run(indices: list[int]) -> dict[int, Any]:
        output = kit.choose(logits[indices], [rows[i] for i in indices], mode=mode)
        assert not output.errors
        return {i: (int(output.token_ids[r]), output.logprobs[r]) for r, i in enumerate(indices)}

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = {i: run([i])[i] for i in range(count)}
    torch.set_num_threads(threads)
    try:
        order = torch.randperm(count, generator=generator).tolist()
        for indices in (list(range(count)), order, order[:7], order[7:9], order[-13:]):
            for i, result in run(indices).items():
                assert result == alone[i], rows[i].params
    finally:
        torch.set_num_threads(before)
