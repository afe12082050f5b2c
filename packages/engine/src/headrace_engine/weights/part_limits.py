"""What a part of an update may be at most, looked at before a byte of its tensors is read. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace_core.errors import RequestError
from headrace_engine.weights.messages import TensorPlace


class PartLimits(NamedTuple):
    """Limits that follow from the model: what it can take at all, about, in its widest form."""

    num_tensors: int
    num_bytes: int

    def check_count(self, count: int) -> None:
        """Raises: RequestError, so many tensors are more than the model has places for."""
        if count > self.num_tensors:
            raise RequestError(
                f"update_weights: tensors: {count} in one part: must be at most {self.num_tensors} for this "
                "model",
                param="tensors",
            )

    def check(self, tensors: Sequence[TensorPlace]) -> None:
        """Check a part by what is said of it.

        Raises:
            RequestError: it has too many bytes, or a name comes twice.
        """
        num_bytes, names = 0, set[str]()
        for one in tensors:
            if one.name in names:
                raise RequestError(
                    f"update_weights: tensor {one.name!r:.200} comes twice in one part: must come once",
                    param="tensors",
                )
            names.add(one.name)
            num_bytes += one.num_bytes
        if num_bytes > self.num_bytes:
            raise RequestError(
                f"update_weights: tensors: {num_bytes} bytes in one part: must be at most {self.num_bytes} "
                "for this model",
                param="tensors",
            )
