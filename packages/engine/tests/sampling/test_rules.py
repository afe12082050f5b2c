"""One field at a time: what it does to the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.sampling.params import SamplingParams
from headrace_engine.sampling.logits_constraints import TokenCounts
from headrace_engine.sampling.masks import completions
from headrace_reference import sample, top_logprobs

NO = -torch.inf
LOGITS = [1.0, 2.0, 3.0, -1.0, 0.5]


@pytest.mark.parametrize(
    ("params", "row", "expected"),
    [
        ({}, {}, LOGITS),
        ({"allowed_token_ids": [3, 0]}, {}, [1.0, NO, NO, -1.0, NO]),
        ({"allowed_token_ids": [3, 3, 99]}, {}, [NO, NO, NO, -1.0, NO]),
        ({"logit_bias": {2: -4.0, 4: 1.5}}, {}, [1.0, 2.0, -1.0, -1.0, 2.0]),
        # bad words: only the last token, only where it would complete the word, output only
        ({}, {"bad_words": [[2]]}, [1.0, 2.0, NO, -1.0, 0.5]),
        ({}, {"bad_words": [[1, 2]], "output": [1]}, [1.0, 2.0, NO, -1.0, 0.5]),
        ({}, {"bad_words": [[1, 2]], "output": [2]}, LOGITS),
        ({}, {"bad_words": [[1, 2]], "prompt": [1]}, LOGITS),
        ({}, {"bad_words": [[4, 1, 2], [3]], "output": [0, 4, 1]}, [1.0, 2.0, NO, NO, 0.5]),
        ({}, {"bad_words": [[4, 1, 2]], "output": [1]}, LOGITS),
        # min_tokens
        ({"min_tokens": 2}, {"stop_token_ids": [2, 4]}, [1.0, 2.0, NO, -1.0, NO]),
        ({"min_tokens": 2}, {"stop_token_ids": [2], "output": [1]}, [1.0, 2.0, NO, -1.0, 0.5]),
        ({"min_tokens": 2}, {"stop_token_ids": [2], "output": [1, 1]}, LOGITS),
        ({"min_tokens": 2}, {"stop_token_ids": [77]}, LOGITS),
        # penalties: presence and frequency over the output, repetition over prompt and output
        ({"presence_penalty": 0.5}, {"prompt": [0], "output": [1, 1, 3]},
         [1.0, 1.5, 3.0, -1.5, 0.5]),
        ({"frequency_penalty": 0.5}, {"prompt": [0], "output": [1, 1, 3]},
         [1.0, 1.0, 3.0, -1.5, 0.5]),
        ({"frequency_penalty": -1.0, "presence_penalty": 0.25}, {"output": [2, 2, 2]},
         [1.0, 2.0, 5.75, -1.0, 0.5]),
        ({"repetition_penalty": 2.0}, {"prompt": [0, 3], "output": [1]},
         [0.5, 1.0, 3.0, -2.0, 0.5]),
        ({"repetition_penalty": 0.5}, {"prompt": [0, 3]}, [2.0, 2.0, 3.0, -0.5, 0.5]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, {"output": [2]},
         [0.5, 2.0, 0.5, -1.0, 0.5]),
        # the mask is stronger than a bias
        ({"allowed_token_ids": [0, 1], "logit_bias": {2: 100.0}}, {}, [1.0, 2.0, NO, NO, NO]),
    ],
)  # fmt: skip
def test_what_a_field_does(
    processed: Callable[..., Any], kit: Any, params: Any, row: Any, expected: Any
) -> None:
    got = processed(LOGITS, params=kit.greedy(**params), **row)
    assert torch.equal(got, torch.tensor(expected))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 0.5}, [2.0, 4.0, 6.0, -2.0, 1.0]),
        ({"temperature": 1.0, "top_k": 2}, [NO, 2.0, 3.0, NO, NO]),
        ({"temperature": 1.0, "top_k": 50}, LOGITS),
        # softmax: .0844 .2294 .6236 .0114 .0512
        ({"temperature": 1.0, "top_p": 0.62}, [NO, NO, 3.0, NO, NO]),
        ({"temperature": 1.0, "top_p": 0.63}, [NO, 2.0, 3.0, NO, NO]),
        ({"temperature": 1.0, "top_p": 1e-9}, [NO, NO, 3.0, NO, NO]),
        # top_p works on what top_k left: .2689, .7311
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, [NO, NO, 3.0, NO, NO]),
        ({"temperature": 1.0, "min_p": 0.2}, [NO, 2.0, 3.0, NO, NO]),
        ({"temperature": 1.0, "min_p": 1.0}, [NO, NO, 3.0, NO, NO]),
        # min_p comes after temperature
        ({"temperature": 0.5, "min_p": 0.2}, [NO, NO, 6.0, NO, NO]),
        ({"temperature": 2.0, "min_p": 0.3}, [0.5, 1.0, 1.5, NO, NO]),
    ],
)
def test_what_a_filter_leaves(processed: Callable[..., Any], params: Any, expected: Any) -> None:
    got = processed(LOGITS, params=SamplingParams(**params))
    assert torch.equal(got, torch.tensor(expected))


def test_rules_see_the_tokens_that_the_worker_appended(kit: Any) -> None:
    params = kit.greedy(presence_penalty=2.0)
    table, rows = kit.table_of([kit.Row(params, bad_words=[[2, 1]])], 5)
    from headrace_engine.sampling import Sampler

    chosen = []
    for _ in range(4):
        logits = torch.tensor([LOGITS])
        output = Sampler(sample, top_logprobs)(logits, table.sampling.batch(rows, table))
        table.append_tokens(rows, output.token_ids)
        chosen.append(int(output.token_ids[0]))
    # 2 (3.0); then 2 has 1.0 and 1 would complete a bad word: 0 ties with 2 at 1.0, lower id wins;
    # then 1 (2.0); then 2 (1.0).
    assert chosen == [2, 0, 1, 2]


def test_rows_without_rules_are_not_touched(kit: Any) -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    rows = [
        kit.Row(kit.greedy(logprobs=-1)),
        kit.Row(kit.greedy(logit_bias={4: 50.0}, logprobs=-1, allowed_token_ids=[4, 5])),
        kit.Row(kit.greedy(logprobs=-1)),
    ]
    output = kit.choose(logits, rows, mode="processed_logits")
    for r in (0, 2):
        entry = output.logprobs[r]
        assert torch.equal(torch.tensor(entry.logprobs), logits[r][entry.token_ids])
    assert output.token_ids.tolist() == [int(logits[0].argmax()), 4, int(logits[2].argmax())]


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 3), max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_completions_are_the_tokens_that_would_complete(
    words: list[list[int]], output: list[int]
) -> None:
    import numpy as np

    found = set(completions(words, np.array(output, np.int32)))
    for token in range(4):
        text = [*output, token]
        assert (token in found) == any(text[-len(word) :] == word for word in words)


@given(first=st.lists(st.integers(0, 40), max_size=50), more=st.lists(st.integers(0, 40)))
@settings(max_examples=100, deadline=None)
def test_counts_equal_a_dictionary(first: list[int], more: list[int]) -> None:
    counts = TokenCounts(first)
    for token in more:
        counts.add(token)
    every = first + more
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist())) == {
        token: every.count(token) for token in set(every)
    }
