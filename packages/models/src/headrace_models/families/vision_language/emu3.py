"""Emu3: an image is tokens of the vocabulary, which a tokenizer of films finds, with one behind each row.

Wang et al. 2024, arXiv:2409.18869.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.vision.media_decoder import TABLE_IN_VECTORS, MediaDecoder, part_of
from headrace_models.layers.vision.towers.video_vq_encoder import (
    VideoVQEncoder,
    video_encoder_rules,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "vqmodel"
_NAME = re.compile(r"<\|visual token (\d{6})\|>")
_ROW_END = "<|extra_200|>"


class Emu3(MediaDecoder):
    """The vectors of an image's places are those of the tokens that its codes are."""

    media_rules: ClassVar[Sequence[WeightRule]] = video_encoder_rules(_TOWER, "encoder")

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.embed.no_adapters = TABLE_IN_VECTORS
        self.encoder = VideoVQEncoder(context, part_of(whole, "vq_config"), _TOWER)
        number = self.settings.integer("vocab_size")
        tokens, self.row_end = visual_tokens(part_of(whole, "vocabulary_map"), number)
        codes = self.encoder.codes.shape[0]
        if not set(range(codes)) <= tokens.keys():
            raise UnsupportedModel(
                f"config.json: vocabulary_map: has tokens for {len(tokens)} of the {codes} codes of images"
            )
        own = [tokens[code] for code in range(codes)]
        self.tokens = torch.tensor(own, device=context.device)

    def unread_weights(self) -> Mapping[str, str]:
        """What makes images of codes, and a count of training."""
        why = "for images that the model makes"
        return {
            rf"{_TOWER}\.(decoder|post_quant_conv)\..*": why,
            rf"{_TOWER}\.encoder\..*\.num_batches_tracked": "a count of training",
        }

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each, of any sizes.
        """
        return [self.embed(self._tokens(item["pixel_values"])) for item in inputs]

    def _tokens(self, image: Tensor) -> Tensor:
        """[rows * (columns + 1)]: an image's, row by row."""
        found = self.tokens[self.encoder(image)]
        return functional.pad(found, (0, 1), value=self.row_end).flatten()


def visual_tokens(vocabulary: Mapping[str, Any], number: int) -> tuple[dict[int, int], int]:
    """Code -> its token, and the token behind a row.

    Args:
        vocabulary: ``vocabulary_map`` of ``config.json``.
        number: tokens.

    Raises: UnsupportedModel: one of these is no token, or there is none behind a row.
    """
    found, ends = {}, []
    for name, token in vocabulary.items():
        match = _NAME.fullmatch(str(name))
        if match is None and name != _ROW_END:
            continue
        if type(token) is not int or not 0 <= token < number:
            raise UnsupportedModel(
                f"config.json: vocabulary_map: {name!r} = {token!r}: must be a token below vocab_size"
            )
        if match is None:
            ends.append(token)
        else:
            found[int(match[1])] = token
    if not ends:
        raise UnsupportedModel(
            f"config.json: vocabulary_map: has no {_ROW_END!r}, which stands behind a row of an image"
        )
    return found, ends[0]
