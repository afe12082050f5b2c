"""One row for each prompt, out of the rows of its tokens. Letters: R rows, n prompts, H hidden size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import Rows


def first(hidden: Tensor, bounds: Tensor) -> Tensor:
    """hidden [R, H], bounds [n + 1] int64 -> [n, H] float32: each prompt's first row."""
    return hidden[bounds[:-1].to(hidden.device)].float()


def last(hidden: Tensor, bounds: Tensor) -> Tensor:
    """Row of each prompt's last token."""
    return hidden[bounds[1:].to(hidden.device) - 1].float()


def mean(hidden: Tensor, bounds: Tensor) -> Tensor:
    """The mean of each prompt's rows, summed in float32, in order.

    Torch's sum of a bag of rows is exactly that, for all prompts in one call.
    """
    everything = torch.arange(hidden.shape[0], device=hidden.device)
    sums = torch.nn.functional.embedding_bag(
        everything, hidden.float(), bounds.to(hidden.device), mode="sum", include_last_offset=True
    )
    return sums / (bounds[1:] - bounds[:-1]).to(hidden.device)[:, None]


class SequencePooling(NamedTuple):
    """A way to pool."""

    rows: Rows
    """Rows of a prompt that it needs."""
    pool: Callable[[Tensor, Tensor], Tensor]


SEQUENCE_POOLING: Mapping[str, SequencePooling] = {
    "CLS": SequencePooling("first", first),
    "LAST": SequencePooling("last", last),
    "MEAN": SequencePooling("all", mean),
}
"""Way to pool by pooling type; the others keep all rows."""
