"""From logits and settings to tokens: greedy, or filtered and drawn by one number per row."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.sampling.params import GREEDY_BELOW
from headrace_reference.dtypes import widened
from headrace_reference.filters import (
    apply_min_p,
    apply_temperature,
    apply_top_k_top_p,
    weights_of,
)

_AT_ONCE = 1 << 18
"""Logits that are filtered and drawn from at once: intermediates stay in the cache (CPU) and in
a few megabytes (everywhere)."""


def sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    *,
    keep_filtered: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :class:`headrace_core.ops.SampleOp`."""
    token_ids = logits.argmax(dim=-1)  # of a row that holds a NaN, its place
    largest = logits.gather(1, token_ids[:, None]).squeeze(1).float()
    usable = torch.isfinite(largest)
    token_ids = token_ids.where(usable, 0)
    random = (usable.cpu() & (temperature >= GREEDY_BELOW)).nonzero().squeeze(1)
    size = max(1, _AT_ONCE // logits.shape[1])
    for first in range(0, len(random), size):
        part = random[first : first + size]
        index = part.to(logits.device)
        # Indexing copies, whatever the dtype.
        filtered = filter_logits(
            widened(logits[index]), temperature[part], min_p[part], top_k[part], top_p[part]
        )
        token_ids[index] = draw(filtered, uniform[part].to(logits.device))
        if keep_filtered:
            logits[index] = filtered
    return token_ids, largest


def fake_sample(
    logits: Tensor, temperature: Tensor, *settings: Tensor, keep_filtered: bool = False
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
    )


def filter_logits(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """Temperature, min_p, top_k, top_p, in that order: logits [R, V], which are changed."""
    apply_temperature(logits, temperature.to(logits.device))
    some = (min_p > 0).nonzero().squeeze(1)
    if some.numel():
        part = min_p[some].to(logits.device)
        logits = _put(logits, some, apply_min_p(_rows(logits, some), part))
    some = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    if some.numel():
        part = apply_top_k_top_p(_rows(logits, some), top_k[some].numpy(), top_p[some].numpy())
        logits = _put(logits, some, part)
    return logits


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


def _rows(logits: Tensor, rows: Tensor) -> Tensor:
    """Rows of the logits: the tensor itself if they are all, else a copy."""
    return logits if len(rows) == logits.shape[0] else logits[rows.to(logits.device)]


def _put(logits: Tensor, rows: Tensor, part: Tensor) -> Tensor:
    """The logits with those rows replaced."""
    if len(rows) == logits.shape[0]:
        return part
    logits[rows.to(logits.device)] = part
    return logits
