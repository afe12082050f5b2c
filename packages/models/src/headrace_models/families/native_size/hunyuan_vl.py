"""HunyuanOCR: a tower in front of Hunyuan's decoder, in which tokens of images stand on four axes: their
number in the prompt, column, row, and the number of their image.

Tencent 2025, HunyuanOCR, arXiv:2511.19575.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import MROPE_POSITIONS, WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.attention.self_attention import Attention, SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.native_size.hunyuan_vl import HunYuanTower, tower_rules
from headrace_models.layers.rotary import ROTARY_ROWS, rows_by_axis
from headrace_models.layers.vision.grid_decoder import GRID, embed_grids, grid_of
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput

_TOWER = "vit"
_AXES = (3, 4)
"""Numbers of axes; of three, the first is left out."""
_ROWS = 1 << 20
"""A row and an image's number are one number: ``-1 - (row * _ROWS + number)``."""
_HALVES = "rotary_rows_of_halves"
"""Key of :attr:`headrace_core.batch.ForwardBatch.extra`: rotation of the first half of a head, and of the
second."""


class HalvesAttention(Attention):
    """The two numbers that turn together may turn by different angles."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        """See :meth:`Attention.attend`."""
        halves: tuple[Tensor, Tensor] | None = batch.extra.get(_HALVES)
        if halves is not None:
            rows = torch.arange(len(query), device=query.device)
            turned = []
            for table in halves:
                own = query.clone(), key.clone()
                self.ops.rotary(*own, rows, table, interleaved=False)
                turned.append(own)
            middle = self.head_dim // 2
            query, key = (
                torch.cat((first[..., :middle], second[..., middle:]), dim=-1)
                for first, second in zip(*turned, strict=True)
            )
        return super().attend(query, key, value, batch)


class HunYuanVL(MediaDecoder, LlamaDecoder):
    """An image is a vector for every four of its patches, one for each of its rows, and two around it."""

    media_rules: ClassVar[Sequence[WeightRule]] = tower_rules(_TOWER, "tower")

    def place_media(self, whole: Mapping[str, Any]) -> None:
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("spatial_merge_size", 2)
        sections = rope_settings(self.settings.config).sections
        if len(sections) not in _AXES or 2 * sum(sections) != self.head_dim():
            raise UnsupportedModel(
                f"config.json: xdrope_section = {list(sections)}: must be {_AXES[0]} or {_AXES[1]} numbers, "
                f"together {self.head_dim() // 2}, half of a head's size"
            )
        self.num_axes = len(sections)
        by_number = torch.arange(self.num_axes).repeat_interleave(2 * torch.tensor(sections))
        self.axes_of_halves = by_number.chunk(2)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision = part_of(whole, "vision_config")
        self.tower = HunYuanTower(context, vision, _TOWER, self.hidden_size())

    def unread_weights(self) -> Mapping[str, str]:
        """A vector that stands between images of several parts."""
        return {r"vit\.perceive\.image_sep": "stands between parts of an image, which has one"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`, and for the inputs
        :func:`headrace_models.layers.vision.grid_decoder.embed_grids`."""
        return embed_grids(self.tower, modality, inputs)

    def attention(self, context: BuildContext, name: str, **differences: Any) -> SelfAttention:
        """See :meth:`LlamaDecoder.attention`."""
        return super().attention(context, name, kind=HalvesAttention, **differences)

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`: [3, num_tokens], the number of a token, its column,
        and its row together with the number of its image (:data:`_ROWS`). Text stands at its number on all
        axes, and so do the tokens around an image."""
        found = torch.arange(num_tokens).repeat(3, 1)
        for index, item in enumerate(media):
            _, height, width = grid_of(item.inputs[GRID[item.modality]])
            rows, columns = height // self.merge, width // self.merge + 1
            inner = slice(item.offset + 1, item.offset + 1 + rows * columns)
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            found[1, inner] = column.flatten()
            found[2, inner] = -1 - (row.flatten() * _ROWS + index)
        return found

    def prepare_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """See :meth:`headrace_models.layers.decoder.Decoder.prepare_batch`."""
        given: Tensor | None = batch.extra.get(MROPE_POSITIONS)
        if given is not None and self.rotary is not None:
            number, column, packed = given
            row = torch.where(packed < 0, (-1 - packed) // _ROWS, packed)
            image = torch.where(packed < 0, (-1 - packed) % _ROWS, packed)
            every, table = (number, column, row, image), self.rotary
            places = torch.stack(every[-self.num_axes :])
            first, second = (
                rows_by_axis(table, places, axes.to(table.device)) for axes in self.axes_of_halves
            )
            # What comes out of both is turned; the layers' own rotation is to leave it as it is.
            still = torch.zeros_like(first)
            still[:, : still.shape[1] // 2] = 1.0
            batch = replace(
                batch, extra={**batch.extra, ROTARY_ROWS: still, _HALVES: (first, second)}
            )
        return super().prepare_batch(batch)
