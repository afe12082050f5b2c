"""Numbers and arrays of other libraries (numpy, torch, ...) as Python's own, and arrays as plain data.

Callers bring them where a number or a list is expected. They are converted once, where a value comes in: what
is behind it, sockets and JSON included, meets Python's own types only. No such library is imported here.

A :class:`PackedArray` crosses a process border in place of a tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def own_value(value: Any) -> Any:
    """A number or an array as Python's own: an ``int``, ``float``, ``bool`` or (nested) list.

    Whatever else comes back as it is: what is to be said of it is the caller's business.
    """
    if type(value) in _PLAIN:
        return value
    if callable(getattr(value, "tolist", None)):
        return _listed(value)
    if isinstance(value, Integral):
        return operator.index(value)
    if isinstance(value, Real):
        return float(value)
    return value


def own_values(values: Any) -> Any:
    """Several values as a list of Python's own; one that is a list of such already is not copied.

    Anything that is not a collection of values (text, a mapping, a single value) comes back as it is.
    """
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping):
        return values
    if callable(getattr(values, "tolist", None)):
        return _listed(values)
    if not isinstance(values, Iterable):
        return values
    if isinstance(values, list) and all(type(value) in _PLAIN for value in values):
        return values
    return [own_value(value) for value in values]


def own_mapping(values: Any) -> Any:
    """A mapping with keys and values of Python's own; whatever else comes back as it is."""
    if not isinstance(values, Mapping):
        return values
    plain = all(type(key) in _PLAIN and type(value) in _PLAIN for key, value in values.items())
    if plain:
        return values
    return {own_value(key): own_value(value) for key, value in values.items()}


def own_json(value: Any) -> Any:
    """A copy of a JSON value with numbers, texts, arrays, sequences and mappings of other libraries in it as
    Python's own. What JSON has not stays as it is.

    Raises:
        RecursionError: it is nested deeper than Python's stack, or holds itself.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {own_json(key): own_json(item) for key, item in value.items()}
    if callable(getattr(value, "tolist", None)):
        return _listed(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [own_json(item) for item in value]
    return own_value(value)


def _listed(value: Any) -> Any:
    """``tolist()``; the value itself where that fails, as for a sparse tensor or one without data."""
    try:
        listed = value.tolist()
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return value
    return value if callable(getattr(listed, "tolist", None)) else listed


ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedArray:
    """Shape, dtype and raw bytes, row by row, in the machine's byte order.

    Raises:
        ValueError: they contradict each other.
    """

    dtype: str
    """One of :data:`ITEM_BYTES`."""
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype = {self.dtype!r}: must be one of {list(ITEM_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape = {self.shape}: must have no negative size")
        size = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != size:
            raise ValueError(f"{len(self.data)} bytes instead of {size} for {self.shape}")

    def tolist(self) -> Any:
        """Nested lists of Python numbers; float32, int64, int32 and uint8 only."""
        flat: Any = memoryview(self.data)
        code = {"float32": "f", "int64": "q", "int32": "i", "uint8": "B"}[self.dtype]
        if not self.shape:
            return flat.cast(code)[0]
        return _empty(self.shape) if 0 in self.shape else flat.cast(code, self.shape).tolist()


def _empty(shape: tuple[int, ...]) -> list[Any]:
    return [_empty(shape[1:]) for _ in range(shape[0])]
