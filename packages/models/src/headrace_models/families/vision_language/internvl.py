"""InternVL by transformers: tiles of an image, whose patches become a vector four at a time.

Zhu et al. 2025, arXiv:2504.10479.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.internvl import InternVLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
_EPS = 1e-5


class InternVL(MediaDecoder):
    """Four patches of a tile are a vector; a video's frame is a tile."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.layer_norm", "projector_norm"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        settings.refuse("vision_feature_select_strategy", "default")
        layer = settings.integer("vision_feature_layer", -1, minimum=-(2**31))
        self.tower = InternVLTower(context, part_of(whole, "vision_config"), _TOWER, last=layer)
        ratio = settings.positive("downsample_ratio", 0.5)
        self.merge = round(1 / ratio)
        if self.merge * ratio != 1 or self.tower.side % self.merge:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio}: {self.tower.side} rows of patches are not so "
                "many whole vectors"
            )
        unit, hidden = self.tower.size * self.merge**2, self.hidden_size()
        self.projector_norm = LayerNorm(context, f"{_PROJECTOR}.layer_norm", unit, _EPS)
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (unit, hidden, hidden),
            settings.activation("projector_hidden_act", default="gelu"),
        )

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return self.tower.unused

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [tiles, 3, height, width] each; of videos ``pixel_values_videos``.
        """
        name = "pixel_values_videos" if modality == "video" else "pixel_values"
        tiles = [item[name] for item in inputs]
        states = self.tower(torch.cat(tiles))
        count, side, _, size = states.shape
        merge, per = self.merge, (side // self.merge) ** 2
        squares = states.view(count, side // merge, merge, side // merge, merge, size)
        units = squares.transpose(2, 3).reshape(count * per, merge**2 * size)
        vectors = self.projector(self.projector_norm(units))
        return list(torch.split(vectors, [len(own) * per for own in tiles]))
