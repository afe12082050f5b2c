"""BGE-M3's three embeddings of one pass: dense, lexical, multi-vector. Letters: n tokens, H hidden size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace_models.layers.base import Layer
from headrace_models.pooling.pooler import make_pooler

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext, PoolingBatch, Rows
    from headrace_core.pooling import PoolingParams
    from headrace_models.pooling.classifier import HeadLinear


class ThreeWayPooler(Layer):
    """Core's ``Pooler``; dense embeddings are pooled as any other model's.

    Args:
        weigh: a token's weight, before the ReLU.
        project: a token's vector.
        first, last: special tokens. The first has no vector, both have no weight.
    """

    tasks: Sequence[str] = ("embed", "token_embed", "token_classify")

    def __init__(
        self,
        context: BuildContext,
        *,
        weigh: HeadLinear,
        project: HeadLinear,
        first: int,
        last: int,
    ) -> None:
        self.head = make_pooler(context)
        self.ops = context.ops
        self.weigh, self.project = weigh, project
        self.first, self.last = first, last

    def rows(self, params: PoolingParams) -> Rows:
        """See :class:`headrace_core.model.Pooler`."""
        return self.head.rows(params)

    def __call__(self, batch: PoolingBatch) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.Pooler`; weights are [n, 1]."""
        texts = batch.hidden.split(batch.cu_rows.diff().tolist())
        results = []
        for index, (x, params) in enumerate(zip(texts, batch.params)):
            ids = batch.token_ids[index]
            if params.task == "token_embed":
                results.append(self._vectors(x, ids, params))
            elif params.task == "token_classify":
                results.append(self._weights(x, ids, params))
            else:
                results.append(self._dense(x, ids, params))
        return results

    def _vectors(self, x: Tensor, ids: Sequence[int], params: PoolingParams) -> Tensor:
        begins = int(len(ids) > 0 and ids[0] == self.first)
        vectors = self.project(x.float())[begins:, : params.dimensions]
        return torch.nn.functional.normalize(vectors, dim=-1) if params.normalize else vectors

    def _weights(self, x: Tensor, ids: Sequence[int], params: PoolingParams) -> Tensor:
        begins = int(len(ids) > 0 and ids[0] == self.first)
        ends = len(ids) - int(len(ids) > begins and ids[-1] == self.last)
        weights = self.weigh(x.float())[begins:ends]
        return weights.relu() if params.use_activation else weights
