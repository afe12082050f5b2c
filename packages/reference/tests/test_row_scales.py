"""Rows with a scale each, against what rounding to equal steps means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_reference.cache import LARGEST_CODES, stored_rows, unpacked

ROWS = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8), min_size=1, max_size=5
)


@pytest.mark.parametrize("dtype", LARGEST_CODES, ids=str)
@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_no_number_is_further_than_half_a_step(dtype: torch.dtype, rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    codes, scale = stored_rows(x, dtype)
    back = unpacked(codes.view(dtype)).double() * scale.double()[:, None]
    assert ((back - x.double()).abs() <= 0.5001 * scale.double()[:, None]).all()
    for row, own in zip(x, scale):
        largest = float(row.abs().max()) / LARGEST_CODES[dtype]
        assert float(own) == pytest.approx(largest, rel=1e-6) or float(own) == 1.0


def test_the_first_of_two_is_in_the_low_half() -> None:
    codes, scale = stored_rows(torch.tensor([[7.0, -1.0, -7.0, 3.0]]), torch.uint8)
    assert codes.tolist() == [[0xF7, 0x39]]
    assert scale.tolist() == [1.0]
    assert unpacked(codes).tolist() == [[7, -1, -7, 3]]


def test_every_byte_is_two_numbers() -> None:
    codes = torch.arange(256).to(torch.uint8)[:, None]
    both = [[(n & 15) - 16 * (n & 15 > 7), (n >> 4) - 16 * (n >> 4 > 7)] for n in range(256)]
    assert unpacked(codes).tolist() == both
