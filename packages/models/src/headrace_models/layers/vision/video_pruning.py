"""Videos of which the tokens are kept that differ most from the frame before: Efficient Video Sampling.

Bagrov et al. 2025, arXiv:2510.14624. How many are kept is settled before the tower runs, so that a prompt's
length is known; which ones is settled by the tower's vectors. Kept tokens have the places in time, height and
width that they have beside all others, and so has the text behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

RETAINED = "num_retained_tokens"
"""Model input of pruned videos: [1] int64, tokens of the item that are kept, text between frames included."""
UNPRUNED = "unpruned_token_ids"
"""Model input: [N] int64, all tokens of an item that has text between its frames, -1 in place of vectors."""
_DIGIT, _NUM_DIGITS = 256, 3
"""A token's index travels beside its vector, in numbers that every dtype of activations holds."""


def most_dissimilar(vectors: Tensor, num_frames: int, number: int) -> Tensor:
    """Indices [number] int64, ascending, of the tokens that are least like the one at their place in the
    frame before, by the cosine. The first frame's come before all others, and of equals the earlier one.

    Args:
        vectors: [num_frames * per frame, W].
    """
    frames = vectors.view(num_frames, -1, vectors.shape[1]).float()
    similarity = torch.cosine_similarity(frames[1:], frames[:-1], dim=-1)
    first = frames.new_full((1, frames.shape[1]), -torch.inf)
    order = torch.cat([first, similarity]).flatten().argsort(stable=True)
    return order[:number].sort().values


def pruned(vectors: Tensor, num_frames: int, item: Mapping[str, Tensor], text: Tensor) -> Tensor:
    """Vectors [kept, W + 3] of an item: those that are kept, each with its index among all.

    Args:
        vectors: [N, W], of all tokens but the text between frames.
        item: the model's inputs.
        text: [n, H] vectors of that text, H at most W.
    """
    number = int(item[RETAINED]) - len(text)
    kept = most_dissimilar(vectors, num_frames, number)
    if UNPRUNED not in item:
        return with_indices(vectors[kept], kept)
    is_text = item[UNPRUNED] >= 0
    whole = vectors.new_zeros(len(is_text), vectors.shape[1])
    whole[~is_text] = vectors
    whole[is_text, : text.shape[1]] = text.to(vectors.dtype)
    places = torch.cat([(~is_text).nonzero()[kept], is_text.nonzero()]).flatten().sort().values
    return with_indices(whole[places], places)


def with_indices(vectors: Tensor, indices: Tensor) -> Tensor:
    """Vectors [n, W + 3]: the last three numbers are an index."""
    powers = [_DIGIT**power for power in range(_NUM_DIGITS)]
    digits = torch.stack([indices // power % _DIGIT for power in powers], dim=1)
    return torch.cat([vectors, digits.to(vectors.dtype)], dim=1)


def without_indices(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors [n, W] and indices [n] int64 of :func:`with_indices`."""
    digits = vectors[:, -_NUM_DIGITS:].long()
    powers = torch.tensor([_DIGIT**power for power in range(_NUM_DIGITS)], device=digits.device)
    return vectors[:, :-_NUM_DIGITS], (digits * powers).sum(1)


def runs_of(is_text: Tensor) -> tuple[tuple[int, int], ...]:
    """(first, number) of the stretches of tokens that are not text."""
    steps = torch.diff((~is_text).int(), prepend=torch.zeros(1), append=torch.zeros(1))
    begins, ends = (steps > 0).nonzero().flatten(), (steps < 0).nonzero().flatten()
    return tuple(zip(begins.tolist(), (ends - begins).tolist(), strict=True))
