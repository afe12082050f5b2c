"""LLaVA-NeXT, LLaVA-NeXT-Video, LLaVA-OneVision and their kin: images in tiles, with a vector at the end of
each row; frames of videos in one tile, a quarter of whose vectors are kept.

Liu et al. 2024, "LLaVA-NeXT"; Zhang et al. 2024, "LLaVA-NeXT: A Strong Zero-shot Video Understanding Model";
Li et al. 2024, arXiv:2408.03326.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.anyres import (
    Size,
    best_canvas,
    canvases,
    exact,
    halved,
    one_plane,
    reduced,
    rounded,
    unpadded,
    with_row_ends,
)
from headrace_models.layers.vision.media_decoder import MediaDecoder
from headrace_models.layers.vision.projected import (
    TOWER_NAMES,
    ProjectedTower,
    projected_rules,
    unread_weights,
)
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_NEWLINE = "image_newline"
_STRIDE = 2
"""Patches of a side of the square whose mean is kept."""


class LlavaNext(MediaDecoder):
    """An image is a small picture of the whole, then rows of vectors of its tiles, margins left out."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *projected_rules("vision"),
        WeightRule(_NEWLINE, "newline.vector"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = TOWER_NAMES
    canvases: ClassVar[Sequence[Size]] = (
        (336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008),
    )  # fmt: skip
    layer: ClassVar[int] = -2
    strategy: ClassVar[str] = "default"
    """Values that configs may leave out."""
    projector_eps: ClassVar[float | None] = None
    projector_widening: ClassVar[int] = 1
    """``norm_eps`` and ``widening`` of :class:`ProjectedTower`."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        own, hidden = type(self), self.hidden_size()
        self.vision = ProjectedTower(
            context, whole, hidden, layer=own.layer, strategy=own.strategy, norm_eps=own.projector_eps,
            widening=own.projector_widening,
        )  # fmt: skip
        self.newline = Vector(_NEWLINE, hidden)
        tower = self.vision.tower
        self.tile, self.side = tower.image_size, tower.side
        if self.vision.num_vectors != self.side**2:
            kept = whole.get("vision_feature_select_strategy", own.strategy)
            raise UnsupportedModel(
                f"config.json: vision_feature_select_strategy = {kept!r}: must leave one state for each "
                "patch of a tile"
            )
        self.sizes = canvases(whole, own.canvases, self.tile)

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return unread_weights(self.vision.tower)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [1 + tiles, 3, height, width] and ``image_sizes`` [2] each, height and
                width of the image.
        """
        pixels = [item["pixel_values"] for item in inputs]
        vectors = torch.split(self.vision(torch.cat(pixels)), [len(tiles) for tiles in pixels])
        found = []
        for states, item in zip(vectors, inputs, strict=True):
            height, width = item["image_sizes"].tolist()
            found.append(self._rows(states, (height, width)))
        return found

    def _rows(self, states: Tensor, image: Size) -> Tensor:
        """states [1 + tiles, side * side, H] -> [vectors, H]."""
        height, width = best_canvas(image, self.sizes)
        plane = one_plane(states[1:], height // self.tile, width // self.tile, self.side)
        plane = self.fitted(unpadded(plane, image, self.scaled))
        return torch.cat((states[0], with_row_ends(plane, self.newline.vector)))

    @staticmethod
    def scaled(length: int, new: int, old: int) -> int:
        """Of :func:`unpadded`."""
        return rounded(length, new, old)

    def fitted(self, plane: Tensor) -> Tensor:
        """plane [rows, columns, H] as it goes into the prompt."""
        return plane


class MiniMaxVL01(LlavaNext):
    """MiniMax-VL-01: more canvases, the last layer's states, and margins in whole numbers (MiniMax 2025,
    arXiv:2501.08313)."""

    canvases: ClassVar[Sequence[Size]] = tuple(
        (height, width)
        for height, width in itertools.product(range(336, 2017, 336), range(336, 2017, 336))
        if height * width <= 2016 * 1008
    )
    layer: ClassVar[int] = -1

    @staticmethod
    def scaled(length: int, new: int, old: int) -> int:
        return exact(length, new, old)


class LlavaNextVideo(LlavaNext):
    """The states of four patches of a frame become their mean before they are projected."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        super().make_towers(context, whole)
        settings = Settings(whole)
        settings.refuse("spatial_pool_mode", "average")
        settings.refuse("spatial_pool_stride", _STRIDE)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: of images as :class:`LlavaNext`'s; of videos ``pixel_values_videos`` [frames, 3, height,
                width] each.
        """
        if modality != "video":
            return super().embed_media(modality, inputs)
        frames = [item["pixel_values_videos"] for item in inputs]
        states = self.vision.tower(torch.cat(frames))[:, self.vision.num_skipped :]
        planes = states.view(len(states), self.side, self.side, -1).permute(0, 3, 1, 2)
        means = torch.nn.functional.avg_pool2d(planes, _STRIDE).flatten(2).transpose(1, 2)
        vectors = self.vision.projector(means.flatten(0, 1))
        return torch.split(vectors, [len(own) * means.shape[1] for own in frames])


class LlavaOnevision(LlavaNext):
    """More canvases; an image of many tiles is made smaller after the tower, and so is each frame of a
    video, which is one tile."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    canvases: ClassVar[Sequence[Size]] = tuple(
        itertools.product(range(384, 2305, 384), range(384, 2305, 384))
    )
    layer: ClassVar[int] = -1
    strategy: ClassVar[str] = "full"
    unbounded: ClassVar[str | None] = None
    """``vision_aspect_ratio`` that makes no image smaller, where there is one."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        super().make_towers(context, whole)
        stated = whole.get("vision_aspect_ratio", "anyres_max_9")
        said = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", str(stated))
        if said is None and stated != type(self).unbounded:
            raise UnsupportedModel(
                f"config.json: vision_aspect_ratio = {stated!r}: must be anyres_max_ and a number of tiles"
            )
        self.most = None if said is None else int(said[1]) * self.side**2

    def fitted(self, plane: Tensor) -> Tensor:
        return plane if self.most is None else reduced(plane, self.most)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: of images as :class:`LlavaNext`'s; of videos ``pixel_values_videos`` [frames, 3, height,
                width] each.
        """
        if modality != "video":
            return super().embed_media(modality, inputs)
        pixels = [item["pixel_values_videos"] for item in inputs]
        states = self.vision(torch.cat(pixels))
        planes = states.view(len(states), self.side, self.side, -1)
        kept = halved(planes).flatten(1, 2)
        end = self.newline.vector[None]
        return [
            torch.cat((own.flatten(0, 1), end))
            for own in torch.split(kept, [len(frames) for frames in pixels])
        ]


class R4B(LlavaOnevision):
    """R-4B: LLaVA-OneVision's images, behind a norm (Yang et al. 2025, arXiv:2508.21113)."""

    modalities: ClassVar[Sequence[str]] = ("image",)
    projector_eps: ClassVar[float | None] = 1e-6
    unbounded: ClassVar[str | None] = "anyres"


class Bee(R4B):
    """Bee-8B: the same with a wider projector (Zhang et al. 2025, arXiv:2510.13795)."""

    projector_widening: ClassVar[int] = 4
