"""Terms that attention adds to a score for the distance of two tokens.

Letters: H heads, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.linear import shard_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class DistanceBias(WeightLayer):
    """A learned number for each head and range of distances: Raffel et al. 2020, arXiv:1910.10683,
    section 2.1, in both directions. Short distances have a range each, longer ones share.

    Args:
        name: as the checkpoint spells it; ``weight`` [num_buckets, num_heads].
        max_distance: from here on all distances are one.
    """

    bias: Tensor
    """[H, 2 P - 1] float32 of this rank's heads, see
    :class:`headrace_core.ops.VarlenAttentionOp`."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        num_buckets: int,
        num_heads: int,
        max_distance: int = 128,
    ) -> None:
        self.name = name
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.num_positions = context.max_model_len
        self.shard = shard_of(num_heads, context.communicator, what=f"{name}, heads")
        self.shape = (num_buckets, num_heads // self.shard.count)

    def slots(self) -> Mapping[str, Slot]:
        return {
            "weight": Slot(
                self.shape, dtype="float32", any_float=True, in_dim=1, in_shard=self.shard
            )
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        far = self.num_positions - 1
        distances = torch.arange(-far, far + 1)
        buckets = distance_buckets(distances, self.num_buckets, self.max_distance)
        self.bias = tensors["weight"][buckets.to(tensors["weight"].device)].T.contiguous()


def distance_buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Key's position minus query's [n] int64 -> range [n] int64: the first half for keys before the
    query and itself, the second for those after it. Half of a half is for single distances, the rest
    grows by a constant factor."""
    half = num_buckets // 2
    exact = half // 2
    away = distances.abs()
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    shared = exact + (growth * (half - exact)).to(torch.int64)
    within = torch.where(away < exact, away, shared.clamp(max=half - 1))
    return within + half * (distances > 0)
