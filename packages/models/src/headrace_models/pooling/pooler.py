"""Core's ``Pooler``: which rows a request needs, and how prompts are computed together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from headrace_core.pooling import TOKEN_TASKS
from headrace_models.layers.base import Layer
from headrace_models.pooling.heads import ClassificationHead, EmbeddingHead, Head
from headrace_models.pooling.sequence import SEQUENCE_POOLING

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext, PoolingBatch, Rows
    from headrace_core.pooling import PoolingInfo, PoolingParams
    from headrace_models.pooling.classifier import Classifier


def make_pooler(context: BuildContext, classifier: Classifier | None = None) -> TaskPooler:
    """The pooler that ``context.pooling`` describes.

    Args:
        classifier: of the model, if it classifies.
    """
    assert context.pooling is not None, "the model is not built for pooling"
    head = EmbeddingHead(context) if classifier is None else ClassificationHead(context, classifier)
    return TaskPooler(context.pooling, head)


class TaskPooler(Layer):
    """Pools each prompt as its task says, and gives it to the head.

    Args:
        head: computes the results of all tasks.
    """

    def __init__(self, info: PoolingInfo, head: Head) -> None:
        self.tasks: Sequence[str] = info.tasks
        self.head = head
        self.steps = info.pooling_type == "STEP"
        self.sequence = SEQUENCE_POOLING.get(info.pooling_type)

    def rows(self, params: PoolingParams) -> Rows:
        """See :class:`headrace_core.model.Pooler`."""
        if params.task in TOKEN_TASKS or self.sequence is None:
            return "all"
        if self.sequence.rows == "first" and params.num_left_out:
            return "all"
        return self.sequence.rows

    def __call__(self, batch: PoolingBatch) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.Pooler`."""
        groups: dict[Hashable, list[int]] = {}
        for index, params in enumerate(batch.params):
            key = (params.task in TOKEN_TASKS, self.head.settings(params))
            groups.setdefault(key, []).append(index)
        results: list[Tensor] = [batch.hidden] * len(batch.params)
        for members in groups.values():
            for index, result in zip(members, self._together(batch, members)):
                results[index] = result
        return results

    def _together(self, batch: PoolingBatch, members: Sequence[int]) -> Sequence[Tensor]:
        """Prompts that ask for the same."""
        params = batch.params[members[0]]
        settings = self.head.settings(params)
        hidden, bounds = _part(batch, members)
        if params.task not in TOKEN_TASKS and self.sequence is not None:
            left_out = [batch.params[index].num_left_out or 0 for index in members]
            if any(left_out) and self.sequence.rows != "last":
                hidden, bounds = _without(hidden, bounds, left_out)
            pooled = self.sequence.pool(hidden, bounds)
            return self.head(pooled, [1] * len(members), settings).unbind(0)
        lengths = bounds.diff().tolist()
        results = torch.split(self.head(hidden.float(), lengths, settings), lengths)
        if not self.steps:
            return results
        return [self._at_steps(x, batch, i) for x, i in zip(results, members)]

    @staticmethod
    def _at_steps(rows: Tensor, batch: PoolingBatch, index: int) -> Tensor:
        """The rows at the tokens that end a step of reasoning; all of them if no token is named."""
        tag = batch.params[index].step_tag_id
        if tag is None:
            return rows
        return rows[torch.tensor([t == tag for t in batch.token_ids[index]], device=rows.device)]


def _without(hidden: Tensor, bounds: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows but for so many of each prompt's first, of which at least one is kept, and their bounds."""
    pieces = []
    for start, length, count in zip(bounds.tolist(), bounds.diff().tolist(), counts):
        pieces.append(hidden[start + min(count, length - 1) : start + length])
    return torch.cat(pieces), torch.tensor([0, *map(len, pieces)]).cumsum(0)


def _part(batch: PoolingBatch, members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows of some of the prompts [R, H], and their bounds [n + 1] int64."""
    if len(members) == len(batch.params):
        return batch.hidden, batch.cu_rows
    chosen = torch.tensor(members)
    lengths = batch.cu_rows.diff()[chosen]
    bounds = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    starts = batch.cu_rows[chosen].tolist()
    pieces = [batch.hidden[s : s + n] for s, n in zip(starts, lengths.tolist())]
    return torch.cat(pieces), bounds
