"""The tower of SigLIP 2 for images of any shape (NaFlex): the table of places is resized to each image.

Tschannen et al. 2025, arXiv:2502.14786, section 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.clip import TOWERS
from headrace_models.layers.vision.towers.fractional import FractionalTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_SIGLIP = "siglip_vision_model"
_DEFAULTS: Mapping[str, Any] = {**TOWERS[_SIGLIP], "num_patches": 256}
"""Values that configs may leave out."""


class NaflexTower(FractionalTower):
    """Patches come as [T, patch * patch * 3], colour by colour within a pixel; arguments as
    :class:`ClipTower`'s."""

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        number, patch = settings.integer("num_patches"), settings.integer("patch_size")
        side = math.isqrt(number)
        if side**2 != number:
            raise UnsupportedModel(
                f"config.json: vision_config.num_patches = {number}: must be a square number"
            )
        sized = {**settings.config, "model_type": _SIGLIP, "image_size": side * patch}
        super().__init__(context, sized, name, final_norm=True)
        size = settings.integer("hidden_size")
        self.patches = PatchEmbedding(
            context, f"{name}.embeddings.patch_embedding", (3 * patch**2,), size, bias=True
        )

    def placed_in(self, height: int, width: int) -> Tensor:
        """[height * width, H]: the table, resized by areas where it becomes smaller."""
        weight = self.positions.weight
        table = weight.view(1, self.side, self.side, -1).permute(0, 3, 1, 2).float()
        found = torch.nn.functional.interpolate(
            table, (height, width), mode="bilinear", antialias=True
        )
        return found[0].flatten(1).T.to(weight.dtype)
