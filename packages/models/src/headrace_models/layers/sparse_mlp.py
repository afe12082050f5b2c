"""A gated feed-forward layer whose gate lets through only what stands out of its row.

You et al. 2025, arXiv:2506.06644, as Gemma 3n has it. Letters: T tokens, I intermediate size.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch

from headrace_models.layers.mlp import GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class SparseGatedMLP(GatedMLP):
    """``down(act(relu(gate - cutoff)) * up)``; the cutoff is where a normal distribution with the row's
    mean and deviation has that share of values below.

    There is no op for the cutoff: it is torch's.

    Args:
        arguments: of :class:`GatedMLP`.
        sparsity: the share, above 0 and below 1.
    """

    def __init__(self, context: BuildContext, name: str, *arguments: Any, sparsity: float) -> None:
        super().__init__(context, name, *arguments)
        self.ops, self.communicator = context.ops, context.communicator
        self.deviations = NormalDist().inv_cdf(sparsity)

    def __call__(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gate = both[:, : both.shape[1] // 2]
        row = gate if self.communicator.world_size == 1 else self.communicator.all_gather(gate)
        deviation, mean = torch.std_mean(row, dim=-1, keepdim=True, correction=0)
        gate.copy_(torch.relu(gate - (mean + deviation * self.deviations)))
        return self.down(self.ops.activation_and_mul(both, self.activation))
