"""``gaussian_topk``: the part of each row above a quantile of a normal distribution (Gemma 3n)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened


def gaussian_topk(x: Tensor, deviations: float) -> Tensor:
    """See :class:`headrace_core.ops.optional.gaussian_topk.GaussianTopKOp`."""
    wide = widened(x)
    mean = wide.mean(dim=-1, keepdim=True)
    deviation = (wide - mean).square().mean(dim=-1, keepdim=True).sqrt()
    return torch.relu(wide - (mean + deviation * deviations)).to(x.dtype)


def fake_gaussian_topk(x: Tensor, deviations: float) -> Tensor:
    return unset_like(x, *x.shape)
