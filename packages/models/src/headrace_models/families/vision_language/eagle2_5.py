"""Eagle 2.5: tiles of an image through SigLIP, four patches a vector, in front of Qwen2.

Chen et al. 2025, arXiv:2504.15271; the projector is InternVL's (Chen et al. 2024, arXiv:2404.16821).
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
from headrace_models.layers.vision.projected import unread_weights
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.clip import ClipTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_model", "mlp1"
_EPS = 1e-5
_LAYER = -4
"""The layer that is read, where configs leave it out."""


class Eagle25(MediaDecoder):
    """Four patches of a tile are a vector; a video's frame is a tile."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.0", "projector_norm"),
        WeightRule(f"{_PROJECTOR}.1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.3", "projector.down"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("vision_model.vision_model.", "vision_model."),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        for adapter in ("use_backbone_lora", "use_llm_lora"):
            settings.refuse(adapter, 0)
        layer = settings.integer("select_layer", _LAYER, minimum=-(2**31))
        stated = part_of(whole, "vision_config")
        # the last norm belongs to what the tower gives, and to none of its layers' states
        self.tower = ClipTower(context, stated, _TOWER, last=layer, final_norm=layer == -1)
        settings.refuse("force_image_size", self.tower.image_size)
        self.side = self.tower.side
        ratio = settings.positive("downsample_ratio", 0.5)
        self.merge = round(1 / ratio)
        if self.merge * ratio != 1 or self.side % self.merge:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio}: {self.side} rows of patches are not so many whole "
                "vectors"
            )
        unit = self.tower.positions.size * self.merge**2
        self.projector_norm = LayerNorm(context, f"{_PROJECTOR}.0", unit, _EPS)
        sizes = unit, self.hidden_size(), self.hidden_size()
        self.projector = Projector(context, f"{_PROJECTOR}.1", f"{_PROJECTOR}.3", sizes, "gelu")

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return unread_weights(self.tower, _TOWER)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` (of videos ``pixel_values_videos``) [tiles, 3, side, side] each.
        """
        name = "pixel_values_videos" if modality == "video" else "pixel_values"
        tiles = [item[name] for item in inputs]
        units = joined(self.tower(torch.cat(tiles)), self.side, self.merge)
        vectors = self.projector(self.projector_norm(units.flatten(0, 1)))
        return torch.split(vectors, [len(own) * units.shape[1] for own in tiles])
