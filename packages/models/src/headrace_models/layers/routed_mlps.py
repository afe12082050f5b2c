"""A mixture of experts that may work on a projection of the stream (Nemotron 3).

Letters: T tokens, H hidden size, L latent size, k experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_models.layers.experts import Experts
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.router import Router

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class RoutedMLPs(MLPLayer):
    """``up(sum over the chosen experts of weight_e * expert_e(down(x))) + shared(x)``.

    Args:
        to_latent, from_latent: down and up; None: experts work on x itself.
    """

    def __init__(
        self,
        context: BuildContext,
        router: Router,
        experts: Experts,
        shared: MLPLayer,
        to_latent: Linear | None = None,
        from_latent: Linear | None = None,
    ) -> None:
        self.ops, self.communicator = context.ops, context.communicator
        self.router = router
        self.experts = experts
        self.shared = shared
        self.to_latent, self.from_latent = to_latent, from_latent

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        inner = x if self.to_latent is None else self.to_latent(x)
        out = self.experts(inner, *self.router(x))
        if self.communicator.world_size > 1:
            out = self.communicator.all_reduce(out)
        out = out if self.from_latent is None else self.from_latent(out)
        return self.ops.add(out, self.shared(x))
