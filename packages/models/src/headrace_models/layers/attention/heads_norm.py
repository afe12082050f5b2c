"""Norms of queries and keys other than one norm for every head alike.

Letters: T tokens, H heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Layer, Part, Slot, WeightLayer
from headrace_models.layers.head_view import in_rows
from headrace_models.layers.linear import shard_of
from headrace_models.layers.norm import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable


class _WholeHeads:
    """All ranks' heads as one row, and back.

    A statistic over them needs them all: with several ranks each gathers what the others project
    and keeps its own part of the result.
    """

    def __init__(self, context: BuildContext, name: str, num_heads: int) -> None:
        self.communicator = context.communicator
        self.shard = shard_of(num_heads, context.communicator, what=f"{name}, heads")

    def join(self, x: Tensor) -> Tensor:
        """[T, H, D] -> [T, all heads * D]."""
        flat = in_rows(x)
        if self.shard.count == 1:
            return flat
        everyone = self.communicator.all_gather(flat)
        copies = self.communicator.world_size // self.shard.count
        ranks = everyone.view(flat.shape[0], self.shard.count, copies, flat.shape[1])
        return ranks[:, :, 0].flatten(1)

    def own(self, whole: Tensor, head_dim: int) -> Tensor:
        """[T, all heads * D] -> [T, H, D]."""
        heads = whole.view(whole.shape[0], -1, head_dim)
        count = heads.shape[1] // self.shard.count
        return heads[:, self.shard.index * count : (self.shard.index + 1) * count]


class WholeRMSNorm(RMSNorm):
    """RMS norm over all heads together (OLMo 2, MiniMax M2): weight [heads * D]."""

    def __init__(
        self, context: BuildContext, name: str, num_heads: int, head_dim: int, eps: float
    ) -> None:
        super().__init__(context, name, num_heads * head_dim, eps)
        self.heads = _WholeHeads(context, name, num_heads)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, D] -> the same shape."""
        return self.heads.own(super().__call__(self.heads.join(x)), x.shape[-1])


class WholeLayerNorm(LayerNorm):
    """LayerNorm over all heads together (MPT): weight and bias [heads * D]."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(context, name, num_heads * head_dim, eps, bias=bias)
        self.heads = _WholeHeads(context, name, num_heads)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, D] -> the same shape."""
        return self.heads.own(super().__call__(self.heads.join(x)), x.shape[-1])


class HeadLayerNorms(Layer):
    """LayerNorm over each head, stored as a norm for each (StableLM 2): ``norms.{head}.weight`` [D].

    Every rank holds all of them.
    """

    def __init__(
        self, context: BuildContext, name: str, num_heads: int, head_dim: int, eps: float
    ) -> None:
        self.ops, self.eps = context.ops, eps
        self.shard = shard_of(num_heads, context.communicator, what=f"{name}, heads")
        self.norms = [
            LayerNorm(context, f"{name}.{head}", head_dim, eps, bias=False)
            for head in range(num_heads)
        ]

    @cached_property
    def weight(self) -> Tensor:
        """[H, D], once loaded."""
        weights = torch.stack([norm.weight for norm in self.norms])
        return weights.chunk(self.shard.count)[self.shard.index].contiguous()

    @cached_property
    def ones(self) -> Tensor:
        """[D]."""
        return torch.ones_like(self.weight[0])

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, D] -> the same shape."""
        return _normed_by_head(self.ops, x, self.weight, self.ones, self.eps)


class HeadLayerNorm(WeightLayer):
    """LayerNorm over each head, with a weight of its own (Cohere): weight [heads, D], no bias."""

    weight: Tensor

    def __init__(
        self, context: BuildContext, name: str, num_heads: int, head_dim: int, eps: float
    ) -> None:
        self.name, self.ops, self.eps = name, context.ops, eps
        shard = shard_of(num_heads, context.communicator, what=f"{name}, heads")
        self.part = Part(num_heads // shard.count, shard)
        self.head_dim = head_dim

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.part.size, self.head_dim), parts=(self.part,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]
        self.ones = torch.ones_like(self.weight[0])

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, D] -> the same shape."""
        return _normed_by_head(self.ops, x, self.weight, self.ones, self.eps)


class HeadRMSNorm(HeadLayerNorm):
    """RMS norm over each head, with a weight of its own (PLaMo 2): weight [heads, D]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, D] -> the same shape."""
        normed = in_rows(self.ops.rms_norm(x, self.ones, self.eps))
        return _weighed_by_head(self.ops, normed, self.weight).view(x.shape)


def _normed_by_head(ops: OpTable, x: Tensor, weight: Tensor, ones: Tensor, eps: float) -> Tensor:
    """x [T, H, D], weight [H, D] -> [T, H, D]. The op of the norm knows one weight for all heads: each
    head's own is a gate, the same row for every token."""
    normed = in_rows(ops.layer_norm(x, ones, None, eps))
    return _weighed_by_head(ops, normed, weight).view(x.shape)


def _weighed_by_head(ops: OpTable, x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H * D], weight [H, D] -> [T, H * D]."""
    return ops.gate(x, weight.as_strided(x.shape, (0, 1)))
