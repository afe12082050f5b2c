"""Vectors in place of a step's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace_engine.execution.prompt_table import PromptTable


def test_vectors_of_two_widths_in_a_step() -> None:
    table = PromptTable(torch.device("cpu"))
    narrow, wide = torch.ones(2, 3), torch.full((2, 9), 2.0)
    table.add_span(0, 0, narrow)
    table.add_span(1, 1, wide)
    found = table.input_embeds(np.array([0, 1]), np.array([0, 0]), np.array([0, 2, 5]))
    assert found is not None
    assert found.rows.tolist() == [0, 1, 3, 4]
    assert torch.equal(found.values[:2, :3], narrow)
    assert not found.values[:2, 3:].any()
    assert torch.equal(found.values[2:], wide)


@pytest.mark.parametrize(
    ("computed", "number", "expected"),
    [
        (0, 9, [0, 6, 6, 3, 4, 6, 6, 7, 8]),
        (3, 4, [3, 4, 6, 6]),
        (7, 2, None),
    ],
)
def test_pieces_see_to_the_end_of_the_last(
    computed: int, number: int, expected: list[int] | None
) -> None:
    table = PromptTable(torch.device("cpu"))
    table.whole_spans[0] = [(1, 3, 5, 7)]
    positions = np.concatenate([np.arange(4), np.arange(computed, computed + number)])
    found = table.last_keys(
        np.array([1, 0]), np.array([0, computed]), np.array([0, 4, 4 + number]), positions
    )
    assert (None if found is None else found.tolist()) == (expected and [0, 1, 2, 3, *expected])
