"""Sparse embeddings: a weight for each token of the vocabulary, out of a head that guesses words.

SPLADE: Formal et al. 2021, arXiv:2109.10086: ``max over the text's tokens of log(1 + relu(logit))``.
Letters: n rows, H hidden size, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Layer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import PoolingBatch, Rows
    from headrace_core.pooling import PoolingParams
    from headrace_models.pooling.classifier import HeadLinear
    from headrace_models.pooling.head_norm import HeadNorm

_ROWS = 256
"""Tokens whose logits are held at once: a vocabulary is wide."""


class WordScores(Layer):
    """The head of a masked language model: ``out(norm(activation(dense(x))))``."""

    def __init__(
        self,
        dense: HeadLinear,
        activation: Callable[[Tensor], Tensor],
        norm: HeadNorm,
        out: HeadLinear,
    ) -> None:
        self.dense = dense
        self.activation = activation
        self.norm = norm
        self.out = out

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, H] float32 -> logits [n, V] float32."""
        return self.out(self.norm(self.activation(self.dense(x))))


class SparsePooler(Layer):
    """Core's ``Pooler`` of models whose embedding has an entry for each word.

    Args:
        total: sum over the tokens in place of the maximum (the first SPLADE, arXiv:2107.05720).
        twice: take the logarithm twice (arXiv:2504.14839).
    """

    tasks: Sequence[str] = ("embed",)

    def __init__(self, scores: WordScores, *, total: bool = False, twice: bool = False) -> None:
        self.scores = scores
        self.total, self.twice = total, twice

    def rows(self, params: PoolingParams) -> Rows:
        """See :class:`headrace_core.model.Pooler`."""
        return "all"

    def __call__(self, batch: PoolingBatch) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.Pooler`; each [V]."""
        texts = torch.split(batch.hidden, batch.cu_rows.diff().tolist())
        return [self._one(x.float(), params) for x, params in zip(texts, batch.params)]

    def _one(self, x: Tensor, params: PoolingParams) -> Tensor:
        """x [n, H] -> [V]; a text by itself, so that no other changes a bit of it."""
        pieces = [self._weights(piece) for piece in torch.split(x, _ROWS)]
        pooled = torch.stack(pieces).sum(0) if self.total else torch.stack(pieces).amax(0)
        return torch.nn.functional.normalize(pooled, dim=0) if params.normalize else pooled

    def _weights(self, x: Tensor) -> Tensor:
        weights = self.scores(x).relu().log1p()
        if self.twice:
            weights = weights.log1p()
        return weights.sum(0) if self.total else weights.amax(0)
