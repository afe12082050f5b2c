"""One row lies as many do."""

from __future__ import annotations

import pytest
import torch

from headrace_models.layers.head_view import by_heads, in_every_row, in_rows


@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_keep_their_stride(tokens: int) -> None:
    whole = torch.arange(tokens * 14.0).view(tokens, 14)
    part = whole[:, 2:10]
    heads = by_heads(part, 4)
    assert torch.equal(heads, part.unflatten(1, (2, 4)))
    assert heads.stride() == (14, 4, 1)
    rows = in_rows(heads)
    assert torch.equal(rows, part)
    assert (rows.stride(), rows.data_ptr()) == ((14, 1), part.data_ptr())


def test_heads_that_lie_apart_are_copied() -> None:
    apart = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    assert torch.equal(in_rows(apart), apart.flatten(1))


@pytest.mark.parametrize("tokens", [1, 3])
def test_one_row_is_all_rows(tokens: int) -> None:
    x = torch.arange(10.0)[2:8]
    rows = in_every_row(x, tokens)
    assert torch.equal(rows, x.expand(tokens, 6))
    assert (rows.stride(), rows.data_ptr()) == ((0, 1), x.data_ptr())
