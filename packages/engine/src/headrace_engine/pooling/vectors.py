"""Arithmetic with results of pooling.

Apart, so that numpy is imported when the first result is there and not while a server starts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace_core.arrays import PackedArray


def as_array(data: PackedArray) -> npt.NDArray[np.float32]:
    """A float32 result as numpy has it; not to be written."""
    return np.frombuffer(data.data, np.float32).reshape(data.shape)


def first_number(data: PackedArray) -> float:
    """The only number of a result."""
    return float(as_array(data).reshape(-1)[0])


def cosine(first: PackedArray, second: PackedArray) -> float:
    """The cosine of two vectors; 0 if one has no length."""
    a, b = (as_array(data).astype(np.float64) for data in (first, second))
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Rounding must not make it more than the cosine of equal directions.
    return max(-1.0, min(1.0, float(a @ b) / norms)) if norms else 0.0


def max_sim(query: PackedArray, document: PackedArray, skipped: list[int]) -> float:
    """The sum, over the query's rows, of the largest product with a row of the document.

    Args:
        skipped: rows of the document that match nothing.
    """
    rows = as_array(document)
    if skipped:
        rows = np.delete(rows, skipped, axis=0)
    if not len(rows):
        return 0.0
    return float((as_array(query) @ rows.T).max(axis=1).sum())


class WeightedMean:
    """A mean of vectors, in float64, in the order in which they are added."""

    def __init__(self) -> None:
        self._sum: npt.NDArray[np.float64] | None = None
        self._weight = 0

    def add(self, data: PackedArray, weight: int) -> None:
        """A further vector."""
        weighted = as_array(data).astype(np.float64) * weight
        self._sum = weighted if self._sum is None else self._sum + weighted
        self._weight += weight

    def result(self, *, normalize: bool) -> PackedArray:
        """The mean as float32, of length 1 if that is asked for."""
        assert self._sum is not None
        mean = self._sum / self._weight
        if normalize:
            mean = mean / max(float(np.linalg.norm(mean)), 1e-12)
        values = mean.astype(np.float32)
        return PackedArray("float32", values.shape, values.tobytes())
