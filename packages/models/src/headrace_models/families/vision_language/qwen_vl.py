"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any size, whose tokens stand in time,
height and width.

Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923; Bai et al. 2025, arXiv:2511.21631.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import INPUT_EMBEDS, InputEmbeds, WeightRule
from headrace_core.multimodal import MediaInput
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.grid_decoder import (
    SECONDS,
    THETA,
    GridDecoder,
    embed_grids,
)
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.qwen3_vl import Qwen3VLTower
from headrace_models.layers.vision.qwen3_vl import tower_rules as qwen3_tower_rules
from headrace_models.layers.vision.qwen_vl import Grid, QwenVLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_TOWER = "visual"
_QWEN3_SECTIONS = (24, 20, 20)
"""Value that configs may leave out."""


class Qwen2VL(GridDecoder):
    """Four patches of an image, or of two frames of a video, are a vector."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")
    second: ClassVar[bool] = False
    """The tower is Qwen2.5-VL's."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower: QwenVLTower | Qwen3VLTower = QwenVLTower(
            context, vision, _TOWER, self.hidden_size(), second=type(self).second
        )
        self.merge = self.tower.merge
        self.rope = rope_settings(self.settings.config, theta=THETA, partial=1.0)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.tower, modality, inputs)


class Qwen2_5VL(Qwen2VL):
    """The tower has windows, RMS norms and gated layers; frames of a video stand apart by seconds."""

    second: ClassVar[bool] = True

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        super().make_towers(context, whole)
        vision = Settings(part_of(whole, "vision_config"))
        self.places_per_second = vision.positive("tokens_per_second", 4)

    def box(self, sizes: Grid, item: MediaInput) -> Tensor:
        """See :meth:`headrace_models.layers.vision.grid_decoder.GridDecoder.box`."""
        box = super().box(sizes, item)
        if item.modality == "video":
            (seconds,) = item.inputs[SECONDS].tolist()
            interval = self.places_per_second * torch.tensor(seconds, dtype=torch.float32)
            box[0] = (box[0] * interval).long()
        return box


class Qwen3VL(Qwen2VL):
    """The tower gives vectors to the decoder's first layers, too: they are added to what comes out of them
    at the images' tokens (Meng et al. 2024, arXiv:2406.04334)."""

    media_rules: ClassVar[Sequence[WeightRule]] = qwen3_tower_rules(_TOWER, "tower")

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = Qwen3VLTower(context, vision, _TOWER, self.hidden_size())
        self.merge = self.tower.merge
        rope = rope_settings(self.settings.config, theta=THETA, partial=1.0)
        sections = rope.sections or _QWEN3_SECTIONS
        self.rope = replace(rope, sections=sections, interleaved_sections=True)

    def input_vectors(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.SupportsPromptEmbeds`: the first numbers of the given ones."""
        given: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if given is not None:
            first = given._replace(values=given.values[:, : self.hidden_size()])
            batch = replace(batch, extra={**batch.extra, INPUT_EMBEDS: first})
        return super().input_vectors(batch)

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """See :meth:`headrace_models.layers.decoder.Decoder.run_blocks`."""
        given: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
        if given is None:
            return super().run_blocks(x, batch)
        levels = torch.split(given.values, self.hidden_size(), dim=1)[1:]
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch)
            if index < len(levels):
                x = x.index_add(0, given.rows, levels[index])
        return x, residual
