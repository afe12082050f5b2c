"""Fuyu: a decoder that reads an image's patches as they are, through one product.

Bavishi et al. 2023, "Fuyu-8B: A multimodal architecture for AI agents".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.vision.media_decoder import MediaDecoder

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_PROJECTION = "vision_embed_tokens"


class Fuyu(MediaDecoder):
    """An image is a vector for each of its patches; rows end with a token."""

    media_rules: ClassVar[Sequence[WeightRule]] = (WeightRule(_PROJECTION, "projection"),)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        size = settings.integer("patch_size", 30) ** 2 * settings.integer("num_channels", 3)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        parts = [Part(self.hidden_size())]
        self.projection = Linear(context, _PROJECTION, size, parts, bias=True)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, patch * patch * 3] each, row by row.
        """
        patches = [item["pixel_values"] for item in inputs]
        vectors = self.projection(torch.cat(patches).to(self.dtype))
        return torch.split(vectors, [len(own) for own in patches])
