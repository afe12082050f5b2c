"""Temperature, min_p, top_k and top_p: which tokens stay possible, and how likely they are.

Letters: R rows, V vocabulary. A row's result depends on that row alone, bit for bit (on the CPU):
what is not elementwise is exact (comparison, sorting of values, counting) or a sum in a fixed
order (``cumsum`` and ``bincount`` in float64). Equal logits at the edge of top_k or top_p are kept
in order of token id, so exactly k tokens, and the smallest set that reaches p, stay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LEAST_WEIGHT = 2e-35

_BINS_PER_UNIT = 32
_LARGEST_DISTANCE = 80
"""In logits below the largest: what lies further has no weight in float64."""


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits [R, V] times 1 / temperature [R] float32, in place: a division per logit takes longer."""
    return logits.mul_(temperature.reciprocal()[:, None])


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than ``min_p`` [R] float32 times the likeliest. logits are [R, V]."""
    # Rounded once, so that every implementation has the same bound.
    least = logits.amax(dim=-1) + min_p.double().log().to(logits.dtype)
    return only(logits >= least[:, None], logits)


def apply_top_k_top_p(
    logits: Tensor, top_k: npt.NDArray[np.integer[Any]], top_p: npt.NDArray[np.float64]
) -> Tensor:
    """Keep the k likeliest tokens, then of those the fewest whose probability reaches p.

    Args:
        logits: [R, V] float32.
        top_k: [R]; 0 = all.
        top_p: [R]; (0, 1].
    """
    num_rows, vocab_size = logits.shape
    by_count = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    by_sum = np.flatnonzero(((top_k < 1) | (top_k >= vocab_size)) & (top_p < 1))
    kept = torch.full((num_rows,), vocab_size, device=logits.device)
    threshold = torch.full((num_rows,), -torch.inf, dtype=logits.dtype, device=logits.device)
    for rows, limits in ((by_count, top_k[by_count]), (by_sum, np.full(len(by_sum), vocab_size))):
        if rows.size:
            index = torch.from_numpy(rows).to(logits.device)
            kept[index], threshold[index] = _cut(logits[index], limits, top_p[rows])
    return only(first_largest(logits, kept, threshold), logits)


def first_largest(values: Tensor, count: Tensor, threshold: Tensor) -> Tensor:
    """The ``count`` largest of each row; among equals the lowest ids.

    Args:
        values: [R, V].
        count: [R] int64, at most V.
        threshold: [R]; the count-th largest value (the largest, if count is 0).

    Returns:
        [R, V] bool.
    """
    inside = values >= threshold[:, None]
    surplus = (inside.sum(dim=-1) > count).nonzero().squeeze(1)
    if surplus.numel():
        edge = values[surplus] == threshold[surplus, None]
        above = inside[surplus] & ~edge
        room = count[surplus] - above.sum(dim=-1)
        inside[surplus] = above | (edge & (edge.cumsum(-1) <= room[:, None]))
    return inside


class _Cut(NamedTuple):
    kept: Tensor
    """[R] int64; how many tokens stay, at least 1."""
    threshold: Tensor
    """[R]; the last one's logit."""


def _cut(
    logits: Tensor, top_k: npt.NDArray[np.integer[Any]], top_p: npt.NDArray[np.float64]
) -> _Cut:
    """Where top_k (1..V) and top_p cut each row."""
    most = int(top_k.max())
    if most == logits.shape[1] and logits.device.type == "cpu":
        cuts = [_cut_by_bins(row, p) for row, p in zip(logits, top_p.tolist())]
        return _Cut(torch.stack([c.kept for c in cuts]), torch.stack([c.threshold for c in cuts]))
    best = torch.topk(logits, most, dim=-1).values
    k = torch.from_numpy(top_k).to(logits.device)[:, None]
    p = torch.from_numpy(top_p).to(logits.device)[:, None]
    in_top_k = torch.arange(most, device=logits.device) < k
    weights = weights_of(best, best[:, :1]) * in_top_k
    sums = weights.cumsum(-1)
    reached = ((sums - weights) < sums[:, -1:] * p) & in_top_k
    # Without top_p all k stay, however little the last ones weigh.
    kept = torch.where(p < 1, reached.sum(dim=-1, keepdim=True), k).clamp(min=1)
    return _Cut(kept.squeeze(1), best.gather(1, kept - 1).squeeze(1))


def _cut_by_bins(logits: Tensor, top_p: float) -> _Cut:
    """Where top_p cuts one row [V], without sorting the vocabulary (on a CPU 15 times dearer).

    Tokens fall into narrow bins by their distance from the largest logit; only the bin in which
    the running sum reaches p is sorted.
    """
    largest = logits.amax()
    distance = (largest - logits).clamp_(max=_LARGEST_DISTANCE)
    bins = distance.mul_(_BINS_PER_UNIT).to(torch.int64)
    sums = torch.bincount(bins, weights=weights_of(logits, largest)).cumsum(0)
    goal = sums[-1] * top_p
    edge = torch.searchsorted(sums, goal)
    above = bins < edge
    inside = torch.sort(logits[bins == edge], descending=True).values
    weights = weights_of(inside, largest)
    before = weights.cumsum(0) - weights
    if int(edge) > 0:
        before += sums[edge - 1]
    further = (before < goal).sum().clamp_(min=1)
    return _Cut(above.sum() + further, inside[further - 1])


def weights_of(logits: Tensor, largest: Tensor) -> Tensor:
    """exp(logits - largest) as float64: [R, V], [R, 1] -> [R, V].

    Weights below 2e-35 (about e^-80) become 0: beside the largest, 1, float64 cannot hold them,
    and exp of -inf or to a denormal takes four times as long. Converted before it is summed:
    ``cumsum(dtype=float64)`` of float32 takes ten times as long.
    """
    weights = (logits - largest).clamp_(min=-80.0).exp_()
    return torch.threshold_(weights, _LEAST_WEIGHT, 0.0).double()


def only(inside: Tensor, logits: Tensor) -> Tensor:
    """A new tensor: the logits where ``inside``, elsewhere -inf. No logit may be NaN or +inf.

    ``1 - 1 / inside`` is 0 or -inf. This is vectorised; ``where`` and ``masked_fill`` with a mask
    are not (torch 2.13 on a CPU) and take four times as long.
    """
    return inside.to(logits.dtype).reciprocal_().neg_().add_(1).add_(logits)
