from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.sampling.logprobs import describe
from headrace_reference import top_logprobs


def entries_of(values: Any, chosen: Any, wanted: Any) -> Any:
    arguments = torch.tensor(values, dtype=torch.float32), torch.tensor(chosen), np.array(wanted)
    return describe(top_logprobs, *arguments, "raw_logits")


def one(values: list[float], chosen: int, wanted: int) -> Any:
    (entry,) = entries_of([values], [chosen], [wanted])
    return entry


@pytest.mark.parametrize(
    ("chosen", "wanted", "ids", "ranks"),
    [
        (1, 0, [1], [3]),
        (1, 1, [1, 3], [3, 1]),
        (3, 1, [3], [1]),
        (3, 2, [3, 0], [1, 2]),
        (0, 3, [0, 3, 1], [2, 1, 3]),
        (2, 2, [2, 3, 0], [4, 1, 2]),
        (2, -1, [2, 3, 0, 1], [4, 1, 2, 3]),
        (2, 9, [2, 3, 0, 1], [4, 1, 2, 3]),
    ],
)
def test_chosen_first_then_by_rank(
    chosen: int, wanted: int, ids: list[int], ranks: list[int]
) -> None:
    values = [-1.0, -1.5, -3.0, -0.5]
    entry = one(values, chosen, wanted)
    assert entry.token_ids == ids
    assert entry.ranks == ranks
    assert entry.logprobs == [values[i] for i in ids]


@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(-3, 0), min_size=9, max_size=9),
            st.integers(0, 8),
            st.integers(-1, 10),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=150, deadline=None)
def test_equal_values_go_by_token_id_in_any_batch(
    rows: list[tuple[list[int], int, int]],
) -> None:
    entries = entries_of(*map(list, zip(*rows)))
    for (row, chosen, wanted), entry in zip(rows, entries):
        order = sorted(range(9), key=lambda i: (-row[i], i))
        best = order if wanted < 0 else order[:wanted]
        assert entry.token_ids == [chosen, *(i for i in best if i != chosen)]
        assert entry.ranks == [1 + sum(v > row[i] for v in row) for i in entry.token_ids]


def test_the_whole_vocabulary_sums_to_one(kit: Any) -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(3)) * 4
    output = kit.choose(logits, [kit.Row(kit.greedy(logprobs=-1)), kit.Row(kit.greedy())])
    assert list(output.logprobs) == [0]
    entry = output.logprobs[0]
    assert len(entry.token_ids) == 500
    assert float(torch.tensor(entry.logprobs).exp().sum()) == pytest.approx(1, abs=1e-4)
    assert entry.ranks == list(range(1, 501))


def test_raw_values_are_taken_before_any_processing(kit: Any) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    rows = [kit.Row(kit.greedy(logprobs=1, logit_bias={0: 9.0}))]
    raw = kit.choose(logits, rows).logprobs[0]
    assert raw.token_ids == [0, 2]
    expected = logits.double().log_softmax(-1)[0, [0, 2]]
    assert raw.logprobs == pytest.approx(expected.tolist(), rel=1e-6)
    assert raw.ranks == [3, 1]
    cooked = kit.choose(logits, rows, mode="processed_logits").logprobs[0]
    assert cooked.logprobs == [10.0]
    assert cooked.ranks == [1]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs"])
def test_named_tokens_are_described_besides_the_best(kit: Any, mode: str) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    rows = [
        kit.Row(kit.greedy()),
        kit.Row(kit.greedy(logprobs=2, logprob_token_ids=[7, 3, 7])),
        kit.Row(kit.greedy(logprob_token_ids=[9])),
    ]
    found = kit.choose(logits, rows, mode=mode).logprobs
    every = [kit.Row(kit.greedy(logprobs=-1))] * 3
    whole = kit.choose(logits, every, mode=mode).logprobs
    assert list(found) == [1, 2]
    best = kit.choose(logits, [kit.Row(kit.greedy(logprobs=2))] * 3, mode=mode).logprobs[1]
    further = [t for t in (7, 3) if t not in best.token_ids]
    assert found[1].token_ids == [*best.token_ids, *further]
    assert found[2].token_ids == list(dict.fromkeys([int(logits[2].argmax()), 9]))
    for r, entry in found.items():
        for token, value, rank in zip(entry.token_ids, entry.logprobs, entry.ranks):
            at = whole[r].token_ids.index(token)
            assert (value, rank) == (whole[r].logprobs[at], whole[r].ranks[at])
