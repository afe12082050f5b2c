"""Encoders of text with a tower for images whose vectors are compared with those of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace_core.model import INPUT_EMBEDS
from headrace_models.layers.vision.media_decoder import MediaModel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext, InputEmbeds


class SharedSpace(MediaModel):
    """An image is a prompt of one placeholder, whose vector of the tower is the result: it does not pass the
    text's blocks. Letters: T tokens of a step, R rows, P size of an embedding."""

    context: BuildContext

    def unread_weights(self) -> Mapping[str, str]:
        """Numbers that turn cosines into logits."""
        return {r"logit_(scale|bias)": "of logits, which embeddings have none of"}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPooling`; [R, P]."""
        images: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if images is None:
            return self._texts(batch)
        rows = batch.logits_rows
        shape = batch.num_tokens, images.values.shape[1]
        all_images = len(images.rows) == batch.num_tokens
        whole = (
            images.values.new_empty(shape)
            if all_images
            else self._texts(replace(batch, logits_rows=None))
        )
        whole = whole.index_copy(0, images.rows, images.values)
        return whole if rows is None else self.context.ops.embedding(rows, whole)

    def _texts(self, batch: ForwardBatch) -> Tensor:
        """[R, P] of the text encoder; rows of images mean nothing."""
        texts = {key: value for key, value in batch.extra.items() if key != INPUT_EMBEDS}
        found: Tensor = super().forward(replace(batch, extra=texts))  # type: ignore[misc]
        return found
