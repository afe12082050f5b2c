"""``lse_correction``: attention to some of the keys, weighed for a sum with attention to the others (decode
context parallelism)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace_reference.dtypes import widened


def lse_correction(out: Tensor, lses: Tensor, rank: int) -> Tensor:
    """See :class:`headrace_core.ops.optional.lse_correction.LSECorrectionOp`. The bits of a row depend on
    that row alone, wherever it stands in the tensors."""
    wide = widened(out)
    none = torch.tensor(-torch.inf, dtype=lses.dtype, device=lses.device)
    lses = torch.where(lses < torch.inf, lses, none)
    top = lses.amax(0)
    weights = _exp(lses - torch.where(top == none, 0.0, top))
    total = weights[0]
    for other in weights[1:]:
        total = total + other
    weight = weights[rank] / torch.where(total == 0.0, 1.0, total)
    share = torch.where(weight[..., None] == 0.0, 0.0, wide * weight[..., None].to(wide.dtype))
    rows, heads, width = out.shape
    by_rank = share.reshape(rows, len(lses), heads // len(lses), width)
    return by_rank.transpose(0, 1).contiguous()


def fake_lse_correction(out: Tensor, lses: Tensor, rank: int) -> Tensor:
    shape = (lses.shape[0], out.shape[0], out.shape[1] // lses.shape[0], out.shape[2])
    return torch.empty(shape, dtype=torch.float32, device=out.device)


_FACTORS = tuple(math.log(2) ** n / math.factorial(n) for n in range(14, -1, -1))


def _exp(x: Tensor) -> Tensor:
    """e^x for x <= 0, by products and sums alone: torch's exp may give other bits at the end of a tensor,
    where vectors do not fit, than in its middle."""
    y = x.double().clamp(min=-1000.0) * (1 / math.log(2))
    whole = y.floor()
    part = y - whole
    power = torch.full_like(part, _FACTORS[0])
    for factor in _FACTORS[1:]:
        power = power * part + factor
    exponent = (whole.clamp(min=-1022.0).long() + 1023) << 52  # of a double
    return (power * exponent.view(torch.float64)).to(x.dtype)
