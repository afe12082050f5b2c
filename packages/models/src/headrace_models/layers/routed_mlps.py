"""A mixture of experts without gates, each an MLP as layers are, so that any method quantizes them
(Nemotron 3).

Letters: T tokens, H hidden size, L latent size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.router import Router

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class RoutedMLPs(MLPLayer):
    """``up(sum over the chosen experts of weight_e * expert_e(down(x))) + shared(x)``.

    Which rows an expert gets depends on contents, so steps are not captured.

    Args:
        to_latent, from_latent: down and up; None: experts work on x itself.
    """

    def __init__(
        self,
        context: BuildContext,
        router: Router,
        experts: Sequence[MLPLayer],
        shared: MLPLayer,
        to_latent: Linear | None = None,
        from_latent: Linear | None = None,
    ) -> None:
        self.ops = context.ops
        self.router = router
        self.experts = list(experts)
        self.shared = shared
        self.to_latent, self.from_latent = to_latent, from_latent

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape. A row's experts are summed in the order of their numbers."""
        weights, ids = self.router(x)
        inner = x if self.to_latent is None else self.to_latent(x)
        total = torch.zeros(inner.shape, dtype=torch.float32, device=x.device)
        for index in torch.unique(ids).tolist():
            rows, places = (ids == index).nonzero(as_tuple=True)
            total[rows] += self.experts[index](inner[rows]).float() * weights[rows, places, None]
        out = total.to(x.dtype)
        out = out if self.from_latent is None else self.from_latent(out)
        return self.ops.add(out, self.shared(x))
