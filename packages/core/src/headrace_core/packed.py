"""Arrays as plain data: what crosses a process border in place of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
