"""Encoders of text with a tower for images whose vectors are compared with those of texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace_core.model import INPUT_EMBEDS
from headrace_models.layers.vision.media_decoder import MediaDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import InputEmbeds


class SharedSpace(MediaDecoder):
    """An image is a prompt of one placeholder, whose vector of the tower is the result: it does not pass the
    text's blocks. Letters: R rows, P size of an embedding."""

    def input_vectors(self, batch: ForwardBatch) -> Tensor:
        """[T, H]: the tokens' vectors; what the blocks make of placeholders is not used."""
        return self.token_vectors(batch.input_ids)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPooling`; [R, P]."""
        images: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if images is None:
            return super().forward(batch)
        rows = batch.logits_rows
        whole = super().forward(replace(batch, logits_rows=None))
        whole = whole.index_copy(0, images.rows, images.values)
        return whole if rows is None else self.context.ops.embedding(rows, whole)
