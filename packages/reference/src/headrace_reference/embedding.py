"""Token embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_reference.dtypes import unset_like


def embedding(ids: Tensor, weight: Tensor, *, beyond: int | None = None) -> Tensor:
    """See :class:`headrace_core.ops.EmbeddingOp`."""
    if beyond is not None:
        ids = torch.where((ids >= 0) & (ids < weight.shape[0]), ids, beyond)
    return weight[ids]


def fake_embedding(ids: Tensor, weight: Tensor, *, beyond: int | None = None) -> Tensor:
    return unset_like(weight, ids.shape[0], weight.shape[1])
