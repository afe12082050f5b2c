"""Chameleon: an image is tokens of the vocabulary, which an encoder with a code book finds.

Chameleon Team 2024, arXiv:2405.09818.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.decoders.pieces import image_tokens
from headrace_models.layers.vision.media_decoder import TABLE_IN_VECTORS, MediaDecoder, part_of
from headrace_models.layers.vision.towers.vq_encoder import VQEncoder, encoder_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "vqmodel"


class Chameleon(MediaDecoder):
    """The vectors of an image's places are those of the tokens that its codes are."""

    media_rules: ClassVar[Sequence[WeightRule]] = encoder_rules(_TOWER, "encoder")

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.embed.no_adapters = TABLE_IN_VECTORS
        self.encoder = VQEncoder(context, part_of(whole, "vq_config"), _TOWER)
        number = self.settings.integer("vocab_size")
        tokens = image_tokens(whole.get("vocabulary_map"), number)
        codes = self.encoder.codes.shape[0]
        if not set(range(codes)) <= tokens.keys():
            raise UnsupportedModel(
                f"config.json: vocabulary_map: has tokens for {len(tokens)} of the {codes} codes of images"
            )
        own = [tokens[code] for code in range(codes)]
        self.tokens = torch.tensor(own, device=context.device)

    def unread_weights(self) -> Mapping[str, str]:
        """What makes images of codes."""
        return {rf"{_TOWER}\.post_quant_conv\..*": "for images that the model makes"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] each.
        """
        codes = self.encoder(torch.stack([item["pixel_values"] for item in inputs]))
        vectors = self.embed(self.tokens[codes.flatten()])
        return list(vectors.view(*codes.shape, -1))
