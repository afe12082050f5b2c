"""Experts of which one more gives nothing: who is sent to it skips them (ZAYA).

Letters: T tokens, H hidden size, E experts that give something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.experts import Experts

if TYPE_CHECKING:
    from torch import Tensor


class SkippingExperts(Experts):
    """Expert E is packed with the others, as zeros: a step is captured whoever is sent where."""

    def _stacked(self, tensors: Mapping[str, Tensor], at: int) -> Tensor:
        stacked = super()._stacked(tensors, at)
        return torch.cat((stacked, torch.zeros_like(stacked[:1])))

    def places(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What to call these with. Only plain weights have room for one more expert: without them, who
        skips is sent to expert 0 for nothing."""
        if self.is_plain:
            return weights, ids
        skips = ids == len(self.halves)
        return weights.masked_fill(skips, 0.0), ids.masked_fill(skips, 0)
