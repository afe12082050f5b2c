"""InstructBLIP: BLIP-2 whose Q-Former reads the prompt's text, in front of Vicuna.

Dai et al. 2023, arXiv:2305.06500.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Part
from headrace_models.layers.blip_tower import TOWER_RULES, BlipTower
from headrace_models.layers.instructed_qformer import InstructedQFormer, instructed_rules
from headrace_models.layers.linear import Linear
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

PROJECTION = "language_projection"
FORMER = "qformer", "query_tokens"
"""The blocks and the queries, as checkpoints spell them."""


class InstructBlip(MediaDecoder):
    """An image is so many vectors as there are queries, which differ with the text."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *TOWER_RULES,
        *instructed_rules(*FORMER, "qformer"),
        WeightRule(PROJECTION, "projection"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.tower = BlipTower(context, part_of(whole, "vision_config"))
        number = Settings(whole).integer("num_query_tokens", 32)
        stated = {**part_of(whole, "qformer_config"), "encoder_hidden_size": self.tower.size}
        self.qformer = InstructedQFormer(
            context, "qformer_config", stated, FORMER, number, self.tower.size
        )
        parts = [Part(self.hidden_size())]
        self.projection = Linear(context, PROJECTION, self.qformer.size, parts, bias=True)

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] and ``qformer_input_ids`` [tokens of the text] each.
        """
        states = self.tower(torch.stack([item["pixel_values"] for item in inputs]))
        return [
            self.projection(self.qformer.instructed(own[None], item["qformer_input_ids"])[0])
            for own, item in zip(states, inputs, strict=True)
        ]
