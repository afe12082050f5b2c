"""Gemma 3 with images: SigLIP's patches, a mean of each square of them through a norm and a projection;
an image's tokens all see each other.

Gemma Team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.projected import TOWER, TOWER_NAMES, unread_weights
from headrace_models.layers.vision.sees_ahead import SeesAhead
from headrace_models.layers.vision.towers.clip import ClipTower, Vector, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_PROJECTOR = "multi_modal_projector"
_TOKENS = 256
"""Tokens of an image, where configs leave it out."""


class Gemma3(SeesAhead):
    """An image, or a part of one, is so many vectors, whatever its size."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.mm_soft_emb_norm", "media_norm"),
        WeightRule(f"{_PROJECTOR}.mm_input_projection_weight", "projection.vector"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = TOWER_NAMES

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = ClipTower(context, vision, TOWER, final_norm=True)
        number = Settings(whole).integer("mm_tokens_per_image", _TOKENS)
        side = math.isqrt(number)
        if side**2 != number or self.tower.side % side:
            raise UnsupportedModel(
                f"config.json: mm_tokens_per_image = {number}: must be a square whose side divides the "
                f"{self.tower.side} patches of a side of an image"
            )
        self._check_windows(number)
        self.pooled = self.tower.side // side
        size, eps = self.tower.positions.size, Settings(vision).number("layer_norm_eps", 1e-6)
        self.media_norm = RMSNorm(context, f"{_PROJECTOR}.mm_soft_emb_norm", size, eps, offset=1.0)
        name = f"{_PROJECTOR}.mm_input_projection_weight"
        self.projection = Vector(name, size, self.hidden_size())

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        return unread_weights(self.tower)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [parts, 3, side, side] each.
        """
        pixels = [item["pixel_values"] for item in inputs]
        states = self.tower(torch.cat(pixels))
        side, step = self.tower.side // self.pooled, self.pooled
        squares = states.view(len(states), side, step, side, step, -1).mean(dim=(2, 4))
        vectors = self.media_norm(squares.flatten(0, 2)) @ self.projection.vector
        return torch.split(vectors, [len(parts) * side**2 for parts in pixels])

    def _check_windows(self, number: int) -> None:
        """An image's first token is within the window of its last."""
        window = self.settings.integer("sliding_window", 4096)
        if number > window:
            raise UnsupportedModel(
                f"config.json: mm_tokens_per_image = {number}: must be at most sliding_window = {window}"
            )
