"""Which experts a row goes to."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.reference.dtypes import widened


def topk_softmax(x: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.TopKSoftmaxOp`."""
    ids = torch.argsort(x, dim=-1, descending=True, stable=True)[:, :k]
    weights = torch.softmax(widened(x), dim=-1).gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids
