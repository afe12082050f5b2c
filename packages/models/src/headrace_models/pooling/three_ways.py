"""BGE-M3's three embeddings of one pass: dense, lexical, multi-vector. Letters: n tokens, H hidden size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.model import PoolingBatch
from headrace_models.layers.base import Layer
from headrace_models.pooling.pooler import make_pooler

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext, Rows
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
        self.dense = make_pooler(context)
        self.ops = context.ops
        self.weigh, self.project = weigh, project
        self.first, self.last = first, last

    def rows(self, params: PoolingParams) -> Rows:
        """See :class:`headrace_core.model.Pooler`."""
        return self.dense.rows(params)

    def __call__(self, batch: PoolingBatch) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.Pooler`; weights are [n, 1]."""
        texts = torch.split(batch.hidden, batch.cu_rows.diff().tolist())
        results: list[Tensor] = list(texts)
        dense = [i for i, params in enumerate(batch.params) if params.task == "embed"]
        if dense:
            for index, vector in zip(dense, self.dense(_some(batch, texts, dense))):
                results[index] = vector
        for index, params in enumerate(batch.params):
            if params.task == "token_embed":
                results[index] = self._vectors(texts[index], batch.token_ids[index], params)
            elif params.task == "token_classify":
                results[index] = self._weights(texts[index], batch.token_ids[index], params)
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


def _some(batch: PoolingBatch, texts: Sequence[Tensor], chosen: Sequence[int]) -> PoolingBatch:
    rows = [texts[index] for index in chosen]
    return PoolingBatch(
        torch.cat(rows),
        torch.tensor([0, *map(len, rows)]).cumsum(0),
        [batch.params[index] for index in chosen],
        [batch.token_ids[index] for index in chosen],
    )
