"""BLIP-2: a ViT's states, of which a Q-Former makes a few vectors, in front of OPT.

Li et al. 2023, arXiv:2301.12597.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Part
from headrace_models.layers.blip_tower import TOWER_RULES, BlipTower
from headrace_models.layers.linear import Linear
from headrace_models.layers.qformer import QFormer, qformer_rules
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

PROJECTION = "language_projection"
FORMER = "qformer", "query_tokens"
"""The blocks and the queries, as checkpoints spell them."""


class Blip2(MediaDecoder):
    """An image is so many vectors as there are queries."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *TOWER_RULES,
        *qformer_rules(*FORMER, "qformer"),
        WeightRule(PROJECTION, "projection"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.tower = BlipTower(context, part_of(whole, "vision_config"))
        number = Settings(whole).integer("num_query_tokens", 32)
        stated = part_of(whole, "qformer_config")
        self.qformer = QFormer(context, "qformer_config", stated, FORMER, number, self.tower.size)
        parts = [Part(self.hidden_size())]
        self.projection = Linear(context, PROJECTION, self.qformer.size, parts, bias=True)

    def unread_weights(self) -> Mapping[str, str]:
        """The Q-Former's layers for texts, with which it was trained."""
        layers = r"encoder\.layer\.\d+\.(intermediate|output)"
        return {rf"qformer\.(embeddings|{layers})\..*": "reads texts, which are not given to it"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] each.
        """
        found = self.qformer(self.tower(torch.stack([item["pixel_values"] for item in inputs])))
        return list(self.projection(found.flatten(0, 1)).view(*found.shape[:2], -1))
