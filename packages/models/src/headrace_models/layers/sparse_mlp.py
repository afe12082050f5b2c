"""A gated feed-forward layer whose gate lets through only what stands out of its row.

You et al. 2025, arXiv:2506.06644, as Gemma 3n has it. Letters: T tokens, I intermediate size.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from headrace_models.layers.mlp import GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class SparseGatedMLP(GatedMLP):
    """``down(act(relu(gate - cutoff)) * up)``; the cutoff is where a normal distribution with the row's
    mean and deviation has that share of values below.

    Args:
        arguments: of :class:`GatedMLP`.
        sparsity: the share, above 0 and below 1.
    """

    def __init__(self, context: BuildContext, name: str, *arguments: Any, sparsity: float) -> None:
        super().__init__(context, name, *arguments)
        self.ops, self.communicator = context.ops, context.communicator
        self.deviations = NormalDist().inv_cdf(sparsity)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        kept = self._kept(gate)
        return self.down(self.ops.gate(up, self.ops.activation(kept, self.activation)))

    def _kept(self, gate: Tensor) -> Tensor:
        """gate [T, I], as this rank has it: what is above the whole row's cutoff, and by how much."""
        ranks, ops = self.communicator.world_size, self.ops
        if ranks == 1:
            return ops.gaussian_topk(gate, self.deviations)
        whole = ops.gaussian_topk(self.communicator.all_gather(gate), self.deviations)
        return whole.chunk(ranks, dim=1)[self.communicator.rank]
