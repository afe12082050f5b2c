"""Numbers on the wire: five types, two orders, three forms."""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.arrays import PackedArray
from headrace_server.pooling.vectors import (
    DTYPES,
    ITEM_BYTES,
    as_base64,
    as_bytes,
    as_json,
    as_sparse_json,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
EDGES = (
    0.0, -0.0, 1.0, -1.0, 448.0, 464.0, -449.0, 57344.0, 61440.0, 65504.0, 65519.0, 65520.0, 1e30, -1e30,
    2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-16, 2.0**-17, 3 * 2.0**-17, 1e-40, 1.0625, 1.1875, 1.125,
    1.00390625, 1.01171875, 2.0**-6, 240.0, 247.9,
)  # fmt: skip


def packed(numbers: Sequence[float]) -> bytes:
    return array("f", numbers).tobytes()


def float8(mantissa: int, bias: int) -> Callable[[int], float]:
    """Code -> value, by the format's definition."""

    def value(code: int) -> float:
        sign, exponent = -1.0 if code & 0x80 else 1.0, (code & 0x7F) >> mantissa
        fraction = (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        if exponent == 0:
            return math.ldexp(sign * fraction, 1 - bias)
        return math.ldexp(sign * (1 + fraction), exponent - bias)

    return value


def half(code: int) -> float:
    value: float = struct.unpack("<e", struct.pack("<H", code))[0]
    return value


def brain(code: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<HH", 0, code))[0]
    return value


FORMATS: dict[str, tuple[str, Callable[[int], float], int]] = {
    "float16": ("H", half, 0x7BFF),
    "bfloat16": ("H", brain, 0x7F7F),
    "fp8_e4m3": ("B", float8(3, 7), 0x7E),
    "fp8_e5m2": ("B", float8(2, 15), 0x7B),
}
"""Item, code -> value, last finite code."""


def nearest(number: float, dtype: str) -> float:
    """By bisection over all codes; ties to even."""
    _, value, last = FORMATS[dtype]
    size = min(abs(number), value(last))
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= size else (low, middle)
    best = min((low, high), key=lambda code: (abs(value(code) - size), code & 1))
    return math.copysign(value(best), number)


def decoded(data: bytes, dtype: str) -> list[float]:
    if dtype == "float32":
        return list(array("f", data))
    item, value, _ = FORMATS[dtype]
    sign = 0x80 if item == "B" else 0x8000
    return [
        -value(c & ~sign) if c & sign else value(c) for c in memoryview(data).cast(item).tolist()
    ]


@pytest.mark.parametrize("dtype", FORMATS)
@given(numbers=st.lists(FLOATS | st.sampled_from(EDGES), min_size=1, max_size=8))
def test_each_number_is_the_nearest(dtype: str, numbers: list[float]) -> None:
    exact = list(array("f", numbers))
    got = decoded(b"".join(as_bytes(packed(numbers), dtype, "native")), dtype)
    if dtype == "bfloat16":  # it reaches as far as float32; past its last number rounds to infinity
        exact = [n for n in exact if abs(n) <= brain(0x7F7F)]
        got = [n for n in got if not math.isinf(n)]
        if len(got) != len(exact):
            return
    assert got == [nearest(number, dtype) for number in exact]
    assert [math.copysign(1, g) for g in got] == [math.copysign(1, e) for e in exact]


@pytest.mark.parametrize("dtype", FORMATS)
def test_edges(dtype: str) -> None:
    exact = list(array("f", EDGES))
    got = decoded(b"".join(as_bytes(packed(EDGES), dtype, "native")), dtype)
    assert got == [nearest(number, dtype) for number in exact]


@pytest.mark.parametrize("dtype", DTYPES)
def test_orders(dtype: str) -> None:
    data = packed([1.5, -2.25, 3.0])
    little, big, native = (
        b"".join(as_bytes(data, dtype, order)) for order in ("little", "big", "native")
    )
    size = ITEM_BYTES[dtype]
    assert len(little) == len(big) == 3 * size
    swapped = b"".join(big[at : at + size][::-1] for at in range(0, len(big), size))
    assert swapped == little
    assert native == (little if sys.byteorder == "little" else big)
    assert little[:size] != little[size : 2 * size]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_do_not_show(dtype: str) -> None:
    """More numbers than are converted at once, and not a multiple of three of them."""
    numbers = [math.sin(i) for i in range(25_001)]
    whole = b"".join(as_bytes(packed(numbers), dtype, "little"))
    single = b"".join(
        part for n in numbers[12_280:12_300] for part in as_bytes(packed([n]), dtype, "little")
    )
    size = ITEM_BYTES[dtype]
    assert whole[12_280 * size : 12_300 * size] == single
    text = json.loads(b"".join(as_base64(packed(numbers), dtype, "little")))
    assert base64.b64decode(text, validate=True) == whole


def test_json() -> None:
    rows = PackedArray("float32", (3, 2), packed([1, 2, 3, 4, 5, 0.5]))
    assert json.loads(b"".join(as_json(rows))) == [[1, 2], [3, 4], [5, 0.5]]
    assert json.loads(b"".join(as_json(PackedArray("float32", (2,), packed([1, -0.5]))))) == [
        1,
        -0.5,
    ]
    none = PackedArray("float32", (0, 2), b"")
    assert json.loads(b"".join(as_json(none))) == []
    many = PackedArray("float32", (9, 1), packed(range(9)))
    assert json.loads(b"".join(as_json(many))) == [[n] for n in range(9)]


def test_sparse_json() -> None:
    vector = PackedArray("float32", (5,), packed([0, 1.5, 0, -0.0, 2]))
    assert json.loads(b"".join(as_sparse_json(vector))) == {"indices": [1, 4], "values": [1.5, 2]}
