"""``match_rms``: rows scaled to the RMS of other rows (Gemma 3n)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_reference.dtypes import unset_like, widened


def match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    """See :class:`headrace_core.ops.optional.match_rms.MatchRMSOp`."""
    wide, target = widened(x), widened(like).square().mean(dim=-1, keepdim=True)
    own = wide.square().mean(dim=-1, keepdim=True).clamp_min(least)
    return (wide * torch.sqrt(target / own)).to(x.dtype)


def fake_match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    return unset_like(x, *x.shape)
