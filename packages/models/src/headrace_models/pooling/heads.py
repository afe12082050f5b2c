"""Heads from pooled rows to results: embeddings, probabilities. Letters: n rows, H hidden size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace_models.layers.base import Layer
from headrace_models.pooling.classifier import Classifier, HeadLinear, apart

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.pooling import PoolingParams

_TINY = 1e-24
"""Keeps a vector of zeros from becoming one of NaNs."""


class Head(Layer, ABC):
    """Computes rows of prompts whose requests ask for the same."""

    @abstractmethod
    def settings(self, params: PoolingParams) -> Hashable:
        """The settings of a request that matter here: equal ones are computed together."""

    @abstractmethod
    def __call__(self, x: Tensor, lengths: Sequence[int], settings: Hashable) -> Tensor:
        """x [n, H] float32, so many rows of each prompt -> [n, size] float32.

        A row's result does not depend on the other prompts' rows.
        """


class _Embedding(NamedTuple):
    dimensions: int | None
    normalize: bool | None


class EmbeddingHead(Head):
    """Dense layers, cut, division by the length, in this order."""

    def __init__(self, context: BuildContext) -> None:
        assert context.pooling is not None
        self.ops = context.ops
        modules = context.pooling.dense
        self.dense = [
            HeadLinear(
                context,
                f"{module.path}.linear",
                module.in_features,
                module.out_features,
                bias=module.bias,
            )
            for module in modules
        ]
        self.activations = [torch_activation(module.activation) for module in modules]

    def settings(self, params: PoolingParams) -> Hashable:
        return _Embedding(params.dimensions, params.normalize)

    def __call__(self, x: Tensor, lengths: Sequence[int], settings: Hashable) -> Tensor:
        assert isinstance(settings, _Embedding)
        for dense, activation in zip(self.dense, self.activations):
            x = dense(x)
            if activation is not None:
                x = apart(activation, x, lengths)
        if settings.dimensions is not None:
            x = x[:, : settings.dimensions].contiguous()
        return self._normed(x) if settings.normalize else x

    def _normed(self, x: Tensor) -> Tensor:
        """Each row over its length: what an RMS norm does if its weight is ``1 / sqrt(H)``. Torch's
        own sum of a single row runs in another order than that of one among many."""
        size = x.shape[1]
        return self.ops.rms_norm(x, x.new_full((size,), size**-0.5), _TINY / size)


class _Classification(NamedTuple):
    use_activation: bool | None
    columns: tuple[int, ...] | None


class ClassificationHead(Head):
    """Logits, less a bias, through an activation."""

    def __init__(self, context: BuildContext, classifier: Classifier) -> None:
        assert context.pooling is not None
        self.classifier = classifier
        self.bias = context.pooling.logit_bias
        self.activation = torch_activation(context.pooling.activation)

    def settings(self, params: PoolingParams) -> Hashable:
        columns = params.returned_token_ids
        return _Classification(params.use_activation, None if columns is None else tuple(columns))

    def __call__(self, x: Tensor, lengths: Sequence[int], settings: Hashable) -> Tensor:
        assert isinstance(settings, _Classification)
        logits = self.classifier(x, lengths)
        if settings.columns is not None:
            logits = logits[:, list(settings.columns)]
        if self.bias is not None:
            logits = logits - self.bias
        if not settings.use_activation or self.activation is None:
            return logits
        return apart(self.activation, logits, lengths)


def torch_activation(name: str) -> Callable[[Tensor], Tensor] | None:
    """The function behind :attr:`headrace_core.pooling.PoolingInfo.activation`; None: nothing to do."""
    if name in ("identity", "Identity"):
        return None
    if name == "softmax":
        return lambda x: torch.softmax(x, dim=-1)
    if name == "sigmoid":
        return torch.sigmoid
    module: Callable[[Tensor], Tensor] = getattr(torch.nn, name)()
    return module
