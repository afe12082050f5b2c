"""Llama 3.1 Nemotron Nano VL and Nemotron Nano V2 VL: tiles of an image through RADIO, four patches a vector,
in front of Llama or of Nemotron-H.

NVIDIA 2025, "Llama-3.1-Nemotron-Nano-VL-8B-V1" and arXiv:2511.03929; the first one's projector is InternVL's
(Chen et al. 2024, arXiv:2404.16821).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.norm import LayerNorm, NormLayer, RMSNorm
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.radio import RadioTower, conditioner_rules, radio_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_model.radio_model", "mlp1"
_EPS = 1e-5
_PROJECTOR_RULES = (
    WeightRule(f"{_PROJECTOR}.0", "projector_norm"),
    WeightRule(f"{_PROJECTOR}.1", "projector.up"),
    WeightRule(f"{_PROJECTOR}.3", "projector.down"),
)


class NemotronNanoVL(MediaDecoder):
    """Four patches of a tile are a vector."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *conditioner_rules(_TOWER, "tower"),
        *radio_rules(_TOWER, "tower"),
        *_PROJECTOR_RULES,
    )
    normalises: ClassVar[bool] = True
    """Whether the tower normalises images itself."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        settings.refuse("ps_version", "v2")
        self.tower = RadioTower(
            context, part_of(whole, "vision_config"), _TOWER, normalises=type(self).normalises
        )
        settings.refuse("vit_hidden_size", self.tower.size)
        self.side = settings.integer("force_image_size") // self.tower.patch
        ratio = settings.positive("downsample_ratio", 0.5)
        self.merge = round(1 / ratio)
        if self.merge * ratio != 1 or self.side % self.merge:
            raise UnsupportedModel(
                f"config.json: downsample_ratio = {ratio}: {self.side} rows of patches are not so many whole "
                "vectors"
            )
        unit = self.tower.size * self.merge**2
        sizes = unit, settings.integer("projector_hidden_size"), self.hidden_size()
        self.projector_norm, self.projector = self.make_projector(context, sizes)

    def make_projector(
        self, context: BuildContext, sizes: tuple[int, int, int]
    ) -> tuple[NormLayer, Projector]:
        """
        Args:
            sizes: of joined patches, between the products, and of the result.
        """
        norm = LayerNorm(context, f"{_PROJECTOR}.0", sizes[0], _EPS)
        return norm, Projector(context, f"{_PROJECTOR}.1", f"{_PROJECTOR}.3", sizes, "gelu")

    def unread_weights(self) -> Mapping[str, str]:
        """What the tower says of a whole image."""
        return {r"vision_model\.radio_model\.summary_idxs": "of the summary, which is not taken"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` (of videos ``pixel_values_videos``) [tiles, 3, side, side] each, in
                numbers from 0 to 1; normalised where the tower does not do that.
        """
        name = "pixel_values_videos" if modality == "video" else "pixel_values"
        tiles = [item[name] for item in inputs]
        units = joined(self.tower(torch.cat(tiles)), self.side, self.merge)
        vectors = self.projector(self.projector_norm(units.flatten(0, 1)))
        return torch.split(vectors, [len(own) * units.shape[1] for own in tiles])


class NemotronNanoVL2(NemotronNanoVL):
    """Nemotron Nano V2 VL: images come normalised, a video's frame is a tile; the projector squares what is
    above zero."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *radio_rules(_TOWER, "tower"),
        *_PROJECTOR_RULES,
    )
    normalises: ClassVar[bool] = False

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings, vision = Settings(whole), part_of(whole, "vision_config")
        settings.choice("ps_version", ("v2",), "v1")
        settings.refuse("sound_config")
        Settings(vision).refuse("separate_video_embedder", False)
        for bound in (
            "min_num_patches",
            "max_num_patches",
        ):  # of images that are not cut into tiles
            Settings(part_of(vision, "args")).refuse(bound)
        super().make_towers(context, whole)

    def make_projector(
        self, context: BuildContext, sizes: tuple[int, int, int]
    ) -> tuple[NormLayer, Projector]:
        norm = RMSNorm(context, f"{_PROJECTOR}.0", sizes[0], _EPS)
        names = f"{_PROJECTOR}.1", f"{_PROJECTOR}.3"
        return norm, Projector(context, *names, sizes, "relu2", bias=False)

    def unread_weights(self) -> Mapping[str, str]:
        """Besides: what the tower would normalise images by."""
        own = {r"vision_model\.radio_model\.input_conditioner\..*": "images come normalised"}
        return {**super().unread_weights(), **own}
