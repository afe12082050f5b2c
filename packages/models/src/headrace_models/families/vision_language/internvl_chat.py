"""InternVL as published: tiles of an image, whose patches become a vector four at a time.

Chen et al. 2024, arXiv:2404.16821 (InternVL 1.5), arXiv:2412.05271 (2.5); Zhu et al. 2025,
arXiv:2504.10479 (3).
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
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.internvl import PUBLISHED, InternVLTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_model", "mlp1"
_EPS = 1e-5
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48, "num_attention_heads": 25,
    "image_size": 224, "qkv_bias": False, "qk_normalization": True, "norm_type": "rms_norm",
}  # fmt: skip
"""Values of the tower (InternViT 6B) that configs may leave out."""


class InternVLChat(MediaDecoder):
    """Four patches of a tile are a vector; a video's frame is a tile."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower", PUBLISHED),
        WeightRule(f"{_PROJECTOR}.0", "projector_norm"),
        WeightRule(f"{_PROJECTOR}.1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.3", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        for adapter in ("use_backbone_lora", "use_llm_lora"):
            settings.refuse(adapter, 0)
        last = settings.integer("select_layer", -1, minimum=-(2**31))
        stated = _as_transformers(part_of(whole, "vision_config"))
        settings.refuse("force_image_size", stated["image_size"])
        self.tower = InternVLTower(context, stated, _TOWER, last=last, layout=PUBLISHED)
        self.by_columns = settings.choice("ps_version", ("v1", "v2"), "v1") == "v1"
        self.merge = self._merge(settings.positive("downsample_ratio", 0.5))
        unit = self.tower.size * self.merge**2
        self.projector_norm = LayerNorm(context, f"{_PROJECTOR}.0", unit, _EPS)
        self.projector = self.make_projector(context, unit)

    def make_projector(self, context: BuildContext, unit: int) -> Projector:
        """
        Args:
            unit: size of joined patches.
        """
        sizes = unit, self.hidden_size(), self.hidden_size()
        return Projector(context, f"{_PROJECTOR}.1", f"{_PROJECTOR}.3", sizes, "gelu")

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
        states, side = self.tower(torch.cat(tiles)), self.tower.side
        units = joined(states.flatten(1, 2), side, self.merge)
        if self.by_columns:  # the first checkpoints have their vectors column by column
            short = side // self.merge
            units = units.view(len(units), short, short, -1).transpose(1, 2).flatten(1, 2)
        vectors = self.projector(self.projector_norm(units.flatten(0, 1)))
        return torch.split(vectors, [len(own) * units.shape[1] for own in tiles])

    def _merge(self, ratio: float) -> int:
        """Patches of a side of the square that becomes a vector.

        Raises: UnsupportedModel: a tile is not so many whole squares.
        """
        merge = round(1 / ratio)
        if merge * ratio != 1 or self.tower.side % merge:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio}: {self.tower.side} rows of patches are not so "
                "many whole vectors"
            )
        return merge


class NVLMD(InternVLChat):
    """NVLM-D: the same tower, whose projector is as wide as the decoder's feed-forward layers (Dai et al.
    2024, arXiv:2409.11402)."""

    modalities: ClassVar[Sequence[str]] = ("image",)

    def make_projector(self, context: BuildContext, unit: int) -> Projector:
        sizes = unit, self.settings.integer("intermediate_size"), self.hidden_size()
        return Projector(context, f"{_PROJECTOR}.1", f"{_PROJECTOR}.3", sizes, "gelu", bias=False)


def _as_transformers(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tower's part of the config with the keys that transformers has for it."""
    settings = Settings({**_DEFAULTS, **stated})
    return {
        **settings.config,
        "attention_bias": settings.flag("qkv_bias", False),
        "use_qk_norm": settings.flag("qk_normalization", True),
        "use_mean_pooling": True,  # no norm behind the last block
    }
