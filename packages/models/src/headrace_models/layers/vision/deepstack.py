"""A decoder whose first layers get vectors of media, too: mixin of the Qwen3 line.

Meng et al. 2024, arXiv:2406.04334.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.model import INPUT_EMBEDS, InputEmbeds
from headrace_models.config.rope import RopeSettings, rope_settings
from headrace_models.layers.vision.grid_decoder import THETA, GridDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch

_SECTIONS = (24, 20, 20)
"""Value that configs may leave out."""


def interleaved_rope(config: Mapping[str, Any]) -> RopeSettings:
    """Rotation of the Qwen3 line: time, height and width turn numbers of a head in turns."""
    rope = rope_settings(config, theta=THETA, partial=1.0)
    return replace(rope, sections=rope.sections or _SECTIONS, interleaved_sections=True)


class DeepstackDecoder(GridDecoder):
    """Vectors of media are as many times as wide as the stream, and once more: those behind the first are
    added to what comes out of the first layers, at the tokens that they stand for."""

    def input_vectors(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPromptEmbeds`: the first numbers of the given ones."""
        given: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if given is not None:
            first = given._replace(values=given.values[:, : self.hidden_size()])
            batch = replace(batch, extra={**batch.extra, INPUT_EMBEDS: first})
        return super().input_vectors(batch)

    def run_layer(
        self, index: int, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`headrace_models.layers.decoder.Decoder.run_layer`."""
        x, residual = super().run_layer(index, x, residual, batch)
        given: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if given is None:
            return x, residual
        levels = torch.split(given.values, self.hidden_size(), dim=1)[1:]
        if index < len(levels):
            x = x.index_add(0, given.rows, levels[index])
        return x, residual
