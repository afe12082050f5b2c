"""Phi-3-vision and Phi-3.5-vision: CLIP's patches of a canvas of tiles and of the whole in one tile, four
patches a vector, in front of Phi-3.

Abdin et al. 2024, arXiv:2404.14219, section 6; the canvas is that of Dong et al. 2024, arXiv:2404.06512.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.anyres import one_plane, with_row_ends
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.clip import ClipTower, Vector, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_PART = "vision_embed_tokens"
_TOWER, _PROJECTION = f"{_PART}.img_processor", f"{_PART}.img_projection"
_TABLE = "model.embed_tokens.weight"
_MERGE = 2
"""Patches of a side of the square that becomes a vector."""
_CLIP: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    "model_type": "clip_vision_model",
}  # fmt: skip
"""The tower, of which published configs say the name only."""


class Phi3V(MediaDecoder):
    """An image is rows of vectors of its canvas, a separator, and rows of the whole; rows have ends."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PART}.glb_GN", "between.vector"),
        WeightRule(f"{_PART}.sub_GN", "row_end.vector"),
        WeightRule(f"{_PROJECTION}.0", "projector.up"),
        WeightRule(f"{_PROJECTION}.2", "projector.down"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = ((f"{_TOWER}.vision_model.", f"{_TOWER}."),)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        stated = part_of(whole, "img_processor")
        self.whole_first = _joins(whole)
        last = Settings(stated).integer("layer_idx", -2, minimum=-(2**31))
        Settings(stated).choice("type_feature", ("patch",), "patch")
        self.tower = ClipTower(context, {**_CLIP, **stated}, _TOWER, last=last)
        size = self.tower.positions.size
        Settings(stated).refuse("image_dim_out", size)
        if self.tower.side % _MERGE:
            raise UnsupportedModel(
                f"config.json: img_processor: {self.tower.side} rows of patches are not so many pairs"
            )
        self.side, unit, hidden = self.tower.side // _MERGE, size * _MERGE**2, self.hidden_size()
        self.between = Vector(f"{_PART}.glb_GN", 1, 1, unit)
        self.row_end = Vector(f"{_PART}.sub_GN", 1, 1, 1, unit)
        self.projector = Projector(
            context, f"{_PROJECTION}.0", f"{_PROJECTION}.2", (unit, hidden, hidden), "gelu"
        )

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the states that are taken."""
        why = "behind the layer of the tower that is read"
        unused = range(len(self.tower.layers), self.tower.num_layers)
        own = {rf"{_TOWER}\.encoder\.layers\.{index}\..*": why for index in unused}
        return {**own, rf"{_TOWER}\.post_layernorm\..*": why}

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Files may hold the table of tokens twice, as the decoder's and as the images' (``wte``)."""
        has_table = False
        for name, tensor, file in tensors:
            if name == _TABLE and has_table:
                continue
            has_table |= name == _TABLE
            yield name, tensor, file

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [1 + tiles, 3, height, width], the whole first, and ``image_grid`` [2]
                each: rows and columns of tiles.
        """
        pixels = [item["pixel_values"] for item in inputs]
        states = self.tower(torch.cat(pixels))[:, 1:]
        units = torch.split(
            joined(states, self.tower.side, _MERGE), [len(tiles) for tiles in pixels]
        )
        grids = [item["image_grid"].tolist() for item in inputs]
        found = [self._rows(own, *grid) for own, grid in zip(units, grids, strict=True)]
        return torch.split(self.projector(torch.cat(found)), [len(rows) for rows in found])

    def _rows(self, units: Tensor, rows: int, columns: int) -> Tensor:
        """units [1 + tiles, side * side, U] -> [vectors, U]."""
        end = self.row_end.vector.flatten()
        whole = with_row_ends(one_plane(units[:1], 1, 1, self.side), end)
        canvas = with_row_ends(one_plane(units[1:], rows, columns, self.side), end)
        first, last = (whole, canvas) if self.whole_first else (canvas, whole)
        return torch.cat((first, self.between.vector[0], last))


def _joins(whole: Mapping[str, Any]) -> bool:
    """How the two parts of an image are joined: True: the whole comes first.

    Raises: UnsupportedModel: there are no two parts, or they are projected otherwise.
    """
    stated = Settings(part_of(whole, "embd_layer"))
    for flag in ("use_hd_transform", "with_learnable_separator"):
        if not stated.flag(flag, False):
            raise UnsupportedModel(f"config.json: embd_layer.{flag} = False: must be true")
    stated.choice("projection_cls", ("mlp",), "linear")
    order = stated.choice("hd_transform_order", ("sub_glb", "glb_sub"), "glb_sub")
    return order == "glb_sub"
