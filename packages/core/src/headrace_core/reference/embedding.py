"""Token embedding."""

from __future__ import annotations

from torch import Tensor


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See :class:`headrace_core.ops.EmbeddingOp`."""
    return weight[ids]
