"""Rows of logits and the requests they belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_core.sampling.params import SamplingParams
from headrace_engine.execution.requests import RequestTable
from headrace_engine.sampling import Sampler, SamplerOutput
from headrace_engine.sampling.state import SamplingBatch
from headrace_reference import sample, top_logprobs
from headrace_testing.fakes.requests import new_request


@dataclass
class Row:
    """One request whose next token is to be chosen."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    request_id: str | None = None


def table_of(rows: Sequence[Row], vocab_size: int, seed: int = 0) -> tuple[RequestTable, Any]:
    table = RequestTable([0], vocab_size=vocab_size, seed=seed)
    numbers = [
        table.add(
            new_request(
                row.request_id or f"r{i}",
                [*row.prompt, *row.output],
                params=row.params,
                num_prompt_tokens=len(row.prompt),
                stop_token_ids=row.stop_token_ids,
                bad_words_token_ids=row.bad_words,
            )
        )
        for i, row in enumerate(rows)
    ]
    assert not table.failures
    return table, np.array(numbers)


def batch_of(rows: Sequence[Row], vocab_size: int, seed: int = 0) -> SamplingBatch:
    table, numbers = table_of(rows, vocab_size, seed)
    return table.sampling.batch(numbers, table)


def choose(
    logits: Tensor, rows: Sequence[Row], mode: str = "raw_logprobs", seed: int = 0
) -> SamplerOutput:
    batch = batch_of(rows, logits.shape[1], seed)
    with torch.inference_mode():
        return Sampler(sample, top_logprobs, logprobs_mode=mode)(logits.clone(), batch)


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)


@pytest.fixture
def kit() -> SimpleNamespace:
    return SimpleNamespace(
        Row=Row, choose=choose, batch_of=batch_of, table_of=table_of, greedy=greedy
    )


@pytest.fixture
def processed() -> Callable[..., Tensor]:
    """Logits [V] of one row after all processing."""

    def make(logits: Sequence[float], **row: Any) -> Tensor:
        params = row.pop("params", greedy())
        params.logprobs = -1
        values = torch.tensor([logits], dtype=torch.float32)
        output = choose(values, [Row(params, **row)], mode="processed_logits")
        entry = output.logprobs[0]
        result = torch.empty(len(logits))
        result[entry.token_ids] = torch.tensor(entry.logprobs)
        return result

    return make
