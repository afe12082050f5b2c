"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any size, whose tokens stand in time,
height and width.

Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923; Bai et al. 2025, arXiv:2511.21631.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import INPUT_EMBEDS, MROPE_POSITIONS, InputEmbeds, WeightRule
from headrace_core.multimodal import MediaInput
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.rotary import ROTARY_ROWS, rows_by_axes
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.qwen3_vl import Qwen3VLTower
from headrace_models.layers.vision.qwen3_vl import tower_rules as qwen3_tower_rules
from headrace_models.layers.vision.qwen_vl import Grid, QwenVLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_TOWER = "visual"
_PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
_GRID: Mapping[str, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}
"""Modality -> name of the model's input."""
_SECONDS = "second_per_grid_ts"
_THETA = 1_000_000.0
_QWEN3_SECTIONS = (24, 20, 20)
"""Values that configs may leave out."""


class Qwen2VL(MediaDecoder):
    """Four patches of an image, or of two frames of a video, are a vector."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")
    second: ClassVar[bool] = False
    """The tower is Qwen2.5-VL's."""

    def place_media(self, whole: Mapping[str, Any]) -> None:
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("spatial_merge_size", 2)
        self.rope = rope_settings(self.settings.config, theta=_THETA, partial=1.0)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower: QwenVLTower | Qwen3VLTower = QwenVLTower(
            context, vision, _TOWER, self.hidden_size(), second=type(self).second
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: of images ``pixel_values`` [patches, numbers] and ``image_grid_thw`` [3] each; of videos
                ``pixel_values_videos`` and ``video_grid_thw``.
        """
        patches = [item[_PIXELS[modality]] for item in inputs]
        grids = [_grid(item[_GRID[modality]].tolist()) for item in inputs]
        return self.tower(patches, grids)

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`: text counts on, an item's tokens stand in a box
        behind the text in front of it, and text goes on behind the box's longest side. An item that has
        text in it, between frames, stands in a box for each of its runs."""
        found, place, done = [], 0, 0
        for item in media:
            runs = item.vector_runs
            time, height, width = _grid(item.inputs[_GRID[item.modality]].tolist())
            sizes = time // len(runs), height // self.merge, width // self.merge
            for first, number in runs:
                text = item.offset + first - done
                found.append(torch.arange(place, place + text).expand(3, text))
                box = self._box(sizes, item)
                found.append(box + place + text)
                place, done = place + text + int(box.max()) + 1, done + text + number
        found.append(torch.arange(place, place + num_tokens - done).expand(3, num_tokens - done))
        return torch.cat(found, dim=1)

    def _box(self, sizes: tuple[int, int, int], item: MediaInput) -> Tensor:
        """[3, vectors] int64: places in time, height and width, from 0."""
        box = torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))
        return box.flatten(1)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See :class:`headrace_core.model.CausalLM`."""
        axes = batch.extra.get(MROPE_POSITIONS)
        table = getattr(self, "rotary", None)
        if axes is not None and table is not None:
            rows = rows_by_axes(table, axes, self.rope)
            batch = replace(batch, extra={**batch.extra, ROTARY_ROWS: rows})
        return super().forward(batch)


class Qwen2_5VL(Qwen2VL):
    """The tower has windows, RMS norms and gated layers; frames of a video stand apart by seconds."""

    second: ClassVar[bool] = True

    def place_media(self, whole: Mapping[str, Any]) -> None:
        super().place_media(whole)
        vision = Settings(part_of(whole, "vision_config"))
        self.places_per_second = vision.positive("tokens_per_second", 4)

    def _box(self, sizes: tuple[int, int, int], item: MediaInput) -> Tensor:
        box = super()._box(sizes, item)
        if item.modality == "video":
            (seconds,) = item.inputs[_SECONDS].tolist()
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

    def place_media(self, whole: Mapping[str, Any]) -> None:
        super().place_media(whole)
        sections = self.rope.sections or _QWEN3_SECTIONS
        self.rope = replace(self.rope, sections=sections, interleaved_sections=True)

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


def _grid(sizes: Sequence[int]) -> Grid:
    time, height, width = sizes
    return time, height, width
