"""Segments of prompts' tokens, for models that tell the two texts of a pair apart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_engine.execution.requests import Ints


class TokenTypes:
    """By row of the request table; a row without any is all 0.

    Args:
        device: where the tensors go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._types: dict[int, npt.NDArray[np.int64]] = {}

    def set(self, row: int, token_type_ids: list[int] | None) -> None:
        """Keep a new request's; None: it brought none."""
        self._types.pop(row, None)
        if token_type_ids is not None and any(token_type_ids):
            self._types[row] = np.array(token_type_ids, np.int64)

    def clear(self, row: int) -> None:
        """Forget a row's request."""
        self._types.pop(row, None)

    def inputs(self, rows: Ints, computed: Ints, cu_seqlens: Ints) -> Tensor:
        """[T] int64: a step's segments.

        Args:
            rows: [B]; rows of the request table.
            computed: [B]; tokens before this step.
            cu_seqlens: [B + 1]; running sum of this step's tokens.
        """
        types = np.zeros(int(cu_seqlens[-1]), np.int64)
        if self._types:
            for b, row in enumerate(rows.tolist()):
                own = self._types.get(row)
                if own is not None:
                    first, start, end = int(computed[b]), int(cu_seqlens[b]), int(cu_seqlens[b + 1])
                    types[start:end] = own[first : first + end - start]
        return torch.from_numpy(types).to(self._device)
