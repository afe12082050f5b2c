from __future__ import annotations

import struct

import pytest

from headrace_core.arrays import PackedArray


def test_rows_come_back() -> None:
    data = struct.pack("=6f", 0, 1, 2, 3, 4, 5)
    assert PackedArray("float32", (2, 3), data).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert PackedArray("int64", (), struct.pack("=q", 7)).tolist() == 7


@pytest.mark.parametrize(
    ("shape", "want"), [((0,), []), ((0, 3), []), ((2, 0), [[], []]), ((1, 0, 4), [[]])]
)
def test_nothing_has_a_shape_too(shape: tuple[int, ...], want: list[object]) -> None:
    assert PackedArray("float32", shape, b"").tolist() == want


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "why"),
    [
        ("float64", (1,), bytes(8), "float64"),
        ("float32", (2,), bytes(7), "7 bytes instead of 8"),
        ("float32", (-1, -2), bytes(8), "negative"),
    ],
)
def test_contradictions_are_refused(
    dtype: str, shape: tuple[int, ...], data: bytes, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        PackedArray(dtype, shape, data)
