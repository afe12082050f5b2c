"""The request table against a plain dictionary, under random arrivals and departures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.sampling.params import SamplingParams
from headrace_core.step import NewRequest
from headrace_engine.execution.inputs import InputBuilder
from headrace_engine.execution.requests import RequestTable
from headrace_testing.fakes.requests import new_request as taken_in


def new_request(name: str, tokens: list[int], blocks: tuple[list[int], ...]) -> NewRequest:
    params = SamplingParams(temperature=0.0)
    return taken_in(name, tokens, blocks, params)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "blocks", "token"]),
        st.integers(0, 30),
        st.integers(1, 40),
    ),
    max_size=120,
)


@given(actions=ACTIONS)
@settings(max_examples=80, deadline=None)
def test_the_table_equals_a_dictionary(actions: list[tuple[str, int, int]]) -> None:
    table = RequestTable([0, 0], vocab_size=1000, seed=0)
    want: dict[str, tuple[list[int], list[int], list[int]]] = {}
    for action, who, size in actions:
        name = f"r{who}"
        numbers = list(range(size, size + size * 7 % 50 + 1))
        if action == "add":
            table.add(new_request(name, numbers, (numbers[:3], numbers[1:3])))
            want[name] = (list(numbers), numbers[:3], numbers[1:3])
        elif action == "remove":
            table.remove(name)
            want.pop(name, None)
        elif action == "blocks":
            table.append_blocks(name, (numbers, numbers[::-1]))
            if name in want:
                want[name] = (want[name][0], want[name][1] + numbers, want[name][2] + numbers[::-1])
        elif name in want:
            table.append_tokens(np.array([table.row_of[name]]), np.array([size]))
            want[name][0].append(size)
    assert set(table.row_of) == set(want)
    assert len(set(table.row_of.values())) == len(want)
    for name, (tokens, *blocks) in want.items():
        row = table.row_of[name]
        assert table.token_ids[row, : table.num_tokens[row]].tolist() == tokens
        for group, ids in enumerate(blocks):
            held = table.block_tables[group][row]
            assert held[: len(ids)].tolist() == ids
            assert table.num_blocks[group, row] == len(ids)
            assert not held[len(ids) :].any()


def test_long_texts_widen_the_table() -> None:
    table = RequestTable([0], vocab_size=10, seed=0)
    row = table.add(new_request("a", [1] * 1023, ([],)))
    for token in (2, 3, 4):
        table.append_tokens(np.array([row]), np.array([token]))
    assert table.token_ids.shape[1] == 2048
    assert table.token_ids[row, 1021:1027].tolist() == [1, 1, 2, 3, 4, 0]
    long = table.add(new_request("b", [5] * 5000, (list(range(1, 400)),)))
    assert table.token_ids[long, :5001].tolist() == [5] * 5000 + [0]
    assert table.block_tables[0][long, :400].tolist() == [*range(1, 400), 0]


@pytest.mark.req("REL-01")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": [1, -1]}, "token id -1"),
        ({"token_ids": []}, "num_computed_tokens = 0"),
        ({"num_computed_tokens": 2}, "num_computed_tokens = 2"),
        ({"num_computed_tokens": -1}, "num_computed_tokens = -1"),
        ({"block_ids": ()}, "0 cache groups"),
        ({"block_ids": (["x"],)}, "invalid literal"),
        ({"token_ids": [2**70, 1]}, "too large"),
    ],
)
def test_what_is_wrong_with_a_request_is_its_own(changes: dict[str, Any], reason: str) -> None:
    table = RequestTable([0], vocab_size=10, seed=0)
    new = new_request("bad", [1, 2], ([1],))
    for name, value in changes.items():
        setattr(new, name, value)
    row = table.add(new)
    assert reason in table.failures[row]
    table.remove("bad")
    assert not table.failures
    assert table.add(new_request("good", [1, 2], ([1],))) == row


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["decode", "decode", "decode", "arrive", "leave", "fail", "block"]),
        st.integers(0, 5),
    ),
    min_size=3,
    max_size=40,
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_inputs_do_not_depend_on_the_steps_before(steps: list[tuple[str, int]]) -> None:
    """A builder that has seen every step gives what a new one gives, settings for sampling too."""
    table = RequestTable([0, 0], vocab_size=1000, seed=0)
    kept = InputBuilder(table, block_size=4, device=torch.device("cpu"))
    added = 0
    for action, who in steps:
        held = list(table.row_of)
        name = held[who % len(held)] if held else ""
        if action == "arrive" or not held:
            added += 1
            table.add(new_request(f"r{added}", [added, 2, 3], ([added], [added])))
        elif action == "leave":
            table.remove(name)
        elif action == "fail":
            table.fail(table.row_of[name], "as told")
        elif action == "block":
            table.append_blocks(name, ([50 + who], [60 + who]))
        scheduled = {
            i: max(1, int(table.num_tokens[r] - table.num_computed_tokens[r]))
            for i, r in table.row_of.items()
        }
        new = InputBuilder(table, block_size=4, device=torch.device("cpu"))
        got, want = kept.build(scheduled), new.build(scheduled)
        assert (got.request_ids, got.errors) == (want.request_ids, want.errors)
        assert got.rows.tolist() == want.rows.tolist()
        assert got.seq_lens.tolist() == want.seq_lens.tolist()
        assert got.sampled.tolist() == want.sampled.tolist()
        assert (got.batch is None) == (want.batch is None)
        if got.batch is None or want.batch is None:
            continue
        for field in ("input_ids", "positions", "cu_seqlens_q", "seq_lens"):
            assert torch.equal(getattr(got.batch, field), getattr(want.batch, field)), field
        for mine, theirs in zip(got.batch.groups, want.batch.groups, strict=True):
            assert torch.equal(mine.block_table, theirs.block_table)
            assert torch.equal(mine.slot_mapping, theirs.slot_mapping)
        settings = table.sampling.batch(got.sampled_rows, table)
        assert settings.keys.tolist() == table.sampling.keys[got.sampled_rows].tolist()
        table.num_computed_tokens[got.rows] = got.seq_lens
        table.append_tokens(got.sampled_rows, np.full(len(got.sampled), 7))
