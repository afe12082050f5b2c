"""Which experts a row goes to."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import dtype_code, matrix


class TopKSoftmax:
    """See :class:`headrace_core.ops.TopKSoftmaxOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.topk_softmax

    def __call__(self, x: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        x, rows, stride = matrix(x)
        experts = x.shape[1]
        weights = torch.empty(rows, k, dtype=torch.float32)
        ids = torch.empty(rows, k, dtype=torch.int64)
        status = self._kernel(
            weights.data_ptr(), ids.data_ptr(), x.data_ptr(), rows, experts, k, stride,
            renormalise, dtype_code(x.dtype),
        )  # fmt: skip
        if status:
            raise ConfigError(f"topk_softmax: k = {k}: must be between 1 and {experts} experts")
        return weights, ids
