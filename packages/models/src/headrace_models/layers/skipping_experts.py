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

    def _one_by_one(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        skips = ids == len(self.halves)
        return super()._one_by_one(x, weights.masked_fill(skips, 0.0), ids.masked_fill(skips, 0))
