"""Choosing one token per row from logits, by one uniform number per row."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_engine.sampling.filters import weights_of


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: the first token whose running sum exceeds u.

    One number per token chosen instead of one per vocabulary entry (as the Gumbel or exponential
    race needs), and tails as fine as float64 allows. The running sum has a fixed order, so a row's
    token depends on that row alone.

    Args:
        logits: [R, V] float32, at least one finite value a row; -inf = impossible.
        uniform: [R] float64 in [0, 1).

    Returns:
        [R] int64.
    """
    sums = weights_of(logits, logits.amax(dim=-1, keepdim=True)).cumsum(-1)
    total = sums[:, -1:]
    # u * total may round up to total, which no running sum exceeds.
    goal = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, goal, right=True).squeeze(1)
