"""A vocabulary some of whose tokens are never answers: they stand for media, or mark them in prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import with_adapters

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear
    from headrace_models.lora.places import LinearPlace

_LEAST = -3e4
"""Logit of a token that is never an answer; float16 has it."""


class EmbeddingInTwo(Embedding):
    """A table stored in two tensors, ``embedding`` and ``new_embedding``.

    Args:
        rows: of each.
    """

    def __init__(self, context: BuildContext, name: str, rows: tuple[int, int], size: int) -> None:
        super().__init__(context, name, sum(rows), size)
        self.rows = rows

    def slots(self) -> Mapping[str, Slot]:
        first, more = self.rows
        return {
            "embedding": Slot((first, self.size)),
            "new_embedding": Slot((more, self.size)),
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = torch.cat((tensors["embedding"], tensors["new_embedding"]))


class ShortHead(WeightLayer):
    """A head some of whose tokens' logits are as low as any.

    Args:
        rows: that are stored, and all of the vocabulary: it has no rows for the last tokens.
        silent: further tokens that are never answers.
    """

    low_rank: LinearPlace | None = None
    """See :class:`~headrace_models.layers.linear.Linear`."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        rows: tuple[int, int],
        size: int,
        silent: Sequence[int] = (),
    ) -> None:
        self.name, self.ops, self.rows, self.size = name, context.ops, rows, size
        self.silent = list(silent)
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.rows[0], self.size))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"]
        stored, every = self.rows
        if every > stored:
            weight = torch.cat((weight, weight.new_zeros(every - stored, self.size)))
        if self.silent:
            weight = weight.index_fill(0, torch.tensor(self.silent, device=weight.device), 0.0)
        self.packed = self.ops.linear.pack(weight)
        self.bias = weight.new_zeros(every)
        self.bias[stored:] = _LEAST
        self.bias[self.silent] = _LEAST

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, size] -> [T, tokens]."""
        assert self.packed is not None, self.name
        return with_adapters(self.low_rank, self.ops.linear(x, self.packed, self.bias), x)
