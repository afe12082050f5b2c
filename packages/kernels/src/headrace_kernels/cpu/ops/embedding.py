"""Rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import int64


class Embedding:
    """See :class:`headrace_core.ops.EmbeddingOp`.

    Raises:
        IndexError: an id is outside [0, V).
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.embedding

    def __call__(self, ids: Tensor, weight: Tensor, *, beyond: int | None = None) -> Tensor:
        ids = int64(ids)
        rows, (size, width) = ids.shape[0], weight.shape
        item = weight.element_size()
        if beyond is not None and not 0 <= beyond < size:
            raise IndexError(f"embedding: beyond = {beyond} is outside [0, {size})")
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        out = torch.empty(rows, width, dtype=weight.dtype)
        status = self._kernel(
            out.data_ptr(), ids.data_ptr(), weight.data_ptr(),
            width * item, weight.stride(0) * item, rows, size,
            -1 if beyond is None else beyond,
        )  # fmt: skip
        if status:
            raise IndexError(f"embedding: an id is outside [0, {size})")
        return out
