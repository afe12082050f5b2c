"""A vocabulary whose last tokens have vectors and no logits: they mark media in prompts, and are never
answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.embedding import Embedding

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear

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
    """A head that has no rows for the last tokens, whose logits are as low as any.

    Args:
        rows: that are stored, and all of the vocabulary.
    """

    def __init__(self, context: BuildContext, name: str, rows: tuple[int, int], size: int) -> None:
        self.name, self.ops, self.rows, self.size = name, context.ops, rows, size
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.rows[0], self.size))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"]
        stored, every = self.rows
        whole = torch.cat((weight, weight.new_zeros(every - stored, self.size)))
        self.packed = self.ops.linear.pack(whole)
        self.bias = weight.new_zeros(every)
        self.bias[stored:] = _LEAST

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, size] -> [T, tokens]."""
        assert self.packed is not None, self.name
        return self.ops.linear(x, self.packed, self.bias)
