"""Heads that turn hidden states into logits. Letters: n rows, H hidden size, L labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.pooling.labels import num_labels

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear
    from headrace_models.pooling.head_norm import HeadNorm

OUT_RULE = WeightRule("classifier", "pooler.head.classifier.out")
"""Rule of :func:`token_classifier`."""
DENSE_RULES = (
    WeightRule("classifier.dense", "pooler.head.classifier.dense"),
    WeightRule("classifier.out_proj", "pooler.head.classifier.out"),
)
"""Rules of :func:`dense_classifier`."""


class HeadLinear(WeightLayer):
    """A linear layer of a head: in the head's own dtype, float32 by default, quantized by nobody.

    Args:
        name: as the checkpoint spells it.
        bias: None: if the checkpoint has one.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool | None = True,
    ) -> None:
        assert context.pooling is not None
        self.name = name
        self.ops = context.ops
        self.takes_views = context.ops.linear.pack_copies
        self.dtype = context.pooling.head_dtype
        self.shape, self.has_bias = (out_features, in_features), bias
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        slots = {"weight": Slot(self.shape, dtype=self.dtype, any_float=True)}
        if self.has_bias is not False:
            needed = self.has_bias is True
            slots["bias"] = Slot(self.shape[:1], self.dtype, any_float=True, required=needed)
        return slots

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.linear.pack(tensors["weight"])
        self.bias = tensors["bias"].clone() if "bias" in tensors else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in_features] float32 -> [n, out_features] float32."""
        assert self.packed is not None, self.name
        return self.ops.linear(x.to(getattr(torch, self.dtype)), self.packed, self.bias).float()


class Classifier(Layer):
    """``out(norm(activation(dense(x))))``, without a norm, or without dense layer and activation.

    Args:
        activation: elementwise.
    """

    def __init__(
        self,
        out: HeadLinear,
        dense: HeadLinear | None = None,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        norm: HeadNorm | None = None,
    ) -> None:
        self.dense = dense
        self.activation = activation
        self.norm = norm
        self.out = out

    def __call__(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x [n, H] float32, so many rows of each prompt -> logits [n, L] float32."""
        if self.dense is not None:
            x = apart(self.activation, self.dense(x), lengths)
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x)


def token_classifier(context: BuildContext, hidden_size: int) -> Classifier:
    """One linear layer, ``classifier``."""
    labels = num_labels(context.config)
    return Classifier(HeadLinear(context, "classifier", hidden_size, labels))


def dense_classifier(
    context: BuildContext,
    hidden_size: int,
    activation: Callable[[Tensor], Tensor] = torch.tanh,
) -> Classifier:
    """RoBERTa's: ``classifier.dense`` and ``classifier.out_proj``."""
    labels = num_labels(context.config)
    return Classifier(
        HeadLinear(context, "classifier.out_proj", hidden_size, labels),
        HeadLinear(context, "classifier.dense", hidden_size, hidden_size),
        activation,
    )


def apart(function: Callable[[Tensor], Tensor], x: Tensor, lengths: Sequence[int]) -> Tensor:
    """``function`` on the rows of each prompt by themselves.

    Torch computes the last few numbers of a tensor with other instructions than the rest, which gives
    other bits: together, a prompt's result would depend on its place in the batch.
    """
    pieces = torch.split(x, list(lengths))
    return function(x) if len(pieces) < 2 else torch.cat([function(piece) for piece in pieces])
