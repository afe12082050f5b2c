"""Learned embeddings of encoders: word, position and segment, summed and normed (BERT)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.encoder import Embeddings
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vocabulary import vocab_shard

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class PositionTable(WeightLayer):
    """Row p is position p. Made of the checkpoint's table once that is loaded.

    Args:
        rows: the checkpoint's table.
        first: its row of position 0.
        segment: added to each row: a table of the one segment that all tokens are in.
    """

    weight: Tensor

    def __init__(
        self, context: BuildContext, rows: Embedding, first: int, segment: Embedding | None
    ) -> None:
        self.name = rows.name
        self.ops = context.ops
        self.rows, self.first, self.segment = rows, first, segment
        count = rows.num_rows - first
        if context.max_model_len > count:
            raise UnsupportedModel(
                f"max_model_len = {context.max_model_len}: must be at most {count}, the positions of "
                f"{rows.name}; learned positions do not extend"
            )

    def slots(self) -> Mapping[str, Slot]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        table = self.rows.weight[self.first :]
        if self.segment is not None:
            table = (table.float() + self.segment.weight.float()).to(table.dtype)
        self.weight = table.contiguous()

    def __call__(self, positions: Tensor) -> Tensor:
        """positions [T] int64 -> [T, size]."""
        return self.ops.embedding(positions, self.weight)


class TextEmbeddings(Embeddings):
    """``norm(word + position + segment)``.

    Args:
        names: the checkpoint's names of the word, position and segment tables and of the norm;
            a segment table named "" is not there.
        num_positions: rows of the position table.
        first_position: its row of position 0.
        num_segments: rows of the segment table; with one, it is added to the positions.
    """

    def __init__(
        self,
        context: BuildContext,
        names: tuple[str, str, str, str],
        *,
        vocab_size: int,
        size: int,
        num_positions: int,
        first_position: int = 0,
        num_segments: int = 0,
        eps: float,
    ) -> None:
        word, position, segment, norm = names
        self.ops = context.ops
        shard = vocab_shard(vocab_size, context.communicator)
        self.words = Embedding(context, word, vocab_size, size, shard=shard)
        rows = Embedding(context, position, num_positions, size)
        segments = Embedding(context, segment, num_segments, size) if num_segments else None
        self.segments = segments if num_segments > 1 else None
        only = segments if num_segments == 1 else None
        self.positions = PositionTable(context, rows, first_position, only)
        self.norm = LayerNorm(context, norm, size, eps)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        words, positions = self.words(batch.input_ids), self.positions(batch.positions)
        if self.segments is not None:
            assert batch.token_type_ids is not None
            words = self.ops.add(words, self.segments(batch.token_type_ids))
        x, _ = self.norm.add(words, positions)
        return x
