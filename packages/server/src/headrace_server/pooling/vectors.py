"""Numbers as clients ask for them: JSON, or bytes of five types in either order.

Results come as float32. Without an array library the conversions are made of what the interpreter
does in C: views, :mod:`struct`, table look-ups, and arithmetic on one large integer whose lanes of 32
bits are the numbers. No lane ever carries into the next, as all numbers are finite.
"""

from __future__ import annotations

import binascii
import functools
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping

from headrace_core.arrays import PackedArray
from headrace_server.streaming.json_parts import json_parts

_LANE = 4
_HALF_MAX = 65504.0
_PIECE = 3 << 12
"""Numbers that are converted in one call. A multiple of three, for base64 without padding between."""


def as_json(values: PackedArray) -> Iterator[bytes]:
    """A vector, or rows of them, as nested JSON lists."""
    flat = memoryview(values.data).cast("f")
    if len(values.shape) == 1:
        return json_parts(flat.tolist())
    num_rows, width = values.shape
    return json_parts(flat[i * width : (i + 1) * width].tolist() for i in range(num_rows))


def as_sparse_json(values: PackedArray) -> Iterator[bytes]:
    """The numbers of a vector that are not 0, and their places."""
    numbers = memoryview(values.data).cast("f").tolist()
    indices = [index for index, number in enumerate(numbers) if number]
    return json_parts({"indices": indices, "values": [numbers[i] for i in indices]})


def as_bytes(data: bytes, dtype: str, endianness: str) -> Iterator[bytes]:
    """float32 numbers, in the machine's order, as numbers of another type and order; in parts, as
    each call keeps other threads waiting.

    Rounded to the nearest, ties to even. What is too large for ``float16`` or an fp8 type becomes its
    largest number: an infinite one would make every similarity NaN.

    Args:
        dtype: of :data:`DTYPES`.
        endianness: ``native``, ``little`` or ``big``.
    """
    convert, item, order = _CONVERTED[dtype], ITEM_BYTES[dtype], resolved(endianness)
    for at in range(0, len(data), _PIECE * _LANE):
        little = _in_order(data[at : at + _PIECE * _LANE], _LANE, sys.byteorder)
        yield _in_order(convert(little), item, order)


def as_base64(data: bytes, dtype: str, endianness: str) -> Iterator[bytes]:
    """The same as a JSON string."""
    yield b'"'
    for part in as_bytes(data, dtype, endianness):
        yield binascii.b2a_base64(part, newline=False)
    yield b'"'


def as_bits(values: PackedArray, *, signed: bool) -> Iterator[bytes]:
    """A vector's signs as a JSON list of bytes: a bit for each number, 1 if it is above 0, the first one
    the highest. What numpy's ``packbits`` makes of ``vector > 0``.

    Args:
        values: one vector; its size is a multiple of 8.
        signed: less 128, so that a byte is in -128..127.
    """
    numbers = memoryview(values.data).cast("f")
    bits = int("".join(["1" if number > 0 else "0" for number in numbers]), 2)
    packed = bits.to_bytes(len(numbers) // 8, "big")
    return json_parts([byte - 128 for byte in packed] if signed else list(packed))


def resolved(endianness: str) -> str:
    """``little`` or ``big``."""
    return sys.byteorder if endianness == "native" else endianness


def _in_order(data: bytes, item: int, order: str) -> bytes:
    """Little-endian items in another order, or the way back."""
    if order == "little" or item == 1:
        return data
    swapped = array({2: "H", 4: "I"}[item], data)
    swapped.byteswap()
    return swapped.tobytes()


def _to_float16(data: bytes) -> bytes:
    count = len(data) // _LANE
    numbers: tuple[float, ...] = struct.unpack(f"<{count}f", data)
    try:
        return struct.pack(f"<{count}e", *numbers)
    except OverflowError:
        bounded = (max(-_HALF_MAX, min(_HALF_MAX, number)) for number in numbers)
        return struct.pack(f"<{count}e", *bounded)


def _to_bfloat16(data: bytes) -> bytes:
    """Half a unit less one is added, and the last bit that stays: then the upper halves are right."""
    lanes, ones = _lanes(data)
    lanes += ones * 0x7FFF + ((lanes >> 16) & ones)
    return _upper_halves(lanes, len(data))


def _to_fp8(data: bytes, mantissa: int, bias: int, largest: int) -> bytes:
    """By way of 16 bits, the last of which says whether anything was cut off behind it: no tie is made
    or lost by that, and 65,536 values have their places in a table."""
    lanes, ones = _lanes(data)
    rests = lanes & (ones * 0xFFFF)
    lanes |= ((rests + ones * 0xFFFF) >> 16 & ones) << 16
    halves = memoryview(_upper_halves(lanes, len(data))).cast("H")
    if sys.byteorder == "big":
        halves = memoryview(_in_order(bytes(halves), 2, "big")).cast("H")
    return bytes(map(_fp8_table(mantissa, bias, largest).__getitem__, halves))


def _lanes(data: bytes) -> tuple[int, int]:
    """Little-endian float32 numbers as one integer, and a 1 for each lane of it."""
    ones = int.from_bytes(b"\1\0\0\0" * (len(data) // _LANE), "little")
    return int.from_bytes(data, "little"), ones


def _upper_halves(lanes: int, size: int) -> bytes:
    """The upper 16 bits of each lane, little-endian."""
    return bytes(memoryview(lanes.to_bytes(size, "little")).cast("H")[1::2])


@functools.cache
def _fp8_table(mantissa: int, bias: int, largest: int) -> bytes:
    """By the upper half of a float32: the fp8 number nearest to it.

    Args:
        mantissa: its bits.
        largest: the last finite code; codes up to there grow with their values.
    """
    positive = bytearray()
    for code in range(largest):
        middle = (_fp8_value(code, mantissa, bias) + _fp8_value(code + 1, mantissa, bias)) / 2
        # A value in the middle goes to the even code. It has few bits, so its upper half is all of it.
        tie = struct.unpack("<I", struct.pack("<f", middle))[0] >> 16
        end = tie + (code % 2 == 0)
        positive += bytes([code]) * (end - len(positive))
    positive += bytes([largest]) * (0x7F81 - len(positive))
    positive += b"\x7f" * (0x8000 - len(positive))  # not a number
    return bytes(positive) + bytes(code | 0x80 for code in positive)


def _fp8_value(code: int, mantissa: int, bias: int) -> float:
    exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    if exponent == 0:
        return float(fraction) * 2.0 ** (1 - bias - mantissa)
    return float((1 << mantissa) + fraction) * 2.0 ** (exponent - bias - mantissa)


_CONVERTED: Mapping[str, Callable[[bytes], bytes]] = {
    "float32": lambda data: data,
    "float16": _to_float16,
    "bfloat16": _to_bfloat16,
    # Open Compute Project, 8-bit Floating Point Specification (OFP8), 2023.
    "fp8_e4m3": lambda data: _to_fp8(data, 3, 7, 0x7E),
    "fp8_e5m2": lambda data: _to_fp8(data, 2, 15, 0x7B),
}
DTYPES = tuple(_CONVERTED)
ITEM_BYTES: Mapping[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Bytes of one number."""
