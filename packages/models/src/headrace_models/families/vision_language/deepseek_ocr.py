"""DeepSeek-OCR: tiles of a page and the page in small through SAM, whose states go through CLIP as well, in
front of DeepSeek's mixture of experts.

Wei et al. 2025, arXiv:2510.18234. Letters: I images, S states of one, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.documents.sam import SamTower
from headrace_models.layers.documents.sam import tower_rules as sam_rules
from headrace_models.layers.documents.tile_rows import ended_rows
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import QuickMLP
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_SAM, _CLIP = "sam_model", "vision_model"
_EPS = 1e-5
_IMAGE_SIZE = 1024
_DEFAULTS: Mapping[str, Any] = {
    "width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14,
}  # fmt: skip
"""Values of CLIP that configs may leave out."""
LOCAL, GRID = "pixel_values_local", "patches_grid"
"""Model inputs: [tiles, 3, side, side], left out if there are none; [2] int64, columns and rows of tiles."""


class DeepseekOCR(MediaDecoder):
    """Rows of states end with a vector of their own; another is the last of an image."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *sam_rules(_SAM, "sam"),
        WeightRule(f"{_CLIP}.embeddings.class_embedding", "clip.first.vector"),
        WeightRule(f"{_CLIP}.embeddings.position_embedding.weight", "clip.positions.vector"),
        WeightRule(f"{_CLIP}.pre_layrnorm", "clip.first_norm"),
        *(
            WeightRule(f"{_CLIP}.transformer.layers.{{}}.{source}", f"clip.layers.{{}}.{target}")
            for source, target in [
                ("layer_norm1", "attention_norm"), ("self_attn.out_proj", "attention.out"),
                ("layer_norm2", "mlp_norm"), ("mlp.fc1", "mlp.up"), ("mlp.fc2", "mlp.down"),
            ]
        ),
        WeightRule(
            f"{_CLIP}.transformer.layers.{{}}.self_attn.qkv_proj",
            "clip.layers.{}.attention.qkv",
            split=(),
        ),
        WeightRule("projector.layers", "projector"),
        WeightRule("image_newline", "newline.vector"),
        WeightRule("view_seperator", "separator.vector"),
    )  # fmt: skip

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision, size = part_of(whole, "vision_config"), self.hidden_size()
        Settings(whole).choice("tile_tag", ("2D",), "2D")
        Settings(part_of(whole, "projector_config")).choice("projector_type", ("linear",), "linear")
        kinds = part_of(vision, "width")
        side = Settings(vision).integer("image_size", _IMAGE_SIZE)
        self.sam = SamTower(context, part_of(kinds, "sam_vit_b"), side, _SAM)
        self.clip = ClipOfStates(context, part_of(kinds, "clip-l-14-224"), _CLIP)
        unit = self.sam.size + self.clip.size
        self.projector = Linear(context, "projector.layers", unit, [Part(size)], bias=True)
        self.newline = Vector("image_newline", size)
        self.separator = Vector("view_seperator", size)

    def unread_weights(self) -> Mapping[str, str]:
        """What CLIP would make of pixels."""
        why = "CLIP sees SAM's states, not pixels"
        return {r"model\.vision_model\.embeddings\.(patch_embedding\.weight|position_ids)": why}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [1, 3, side, side], the page in small; :data:`LOCAL` and :data:`GRID`.
        """
        found, end = [], self.newline.vector
        for item in inputs:
            pieces = [ended_rows(self._states(item["pixel_values"]), (1, 1), end)]
            if LOCAL in item:
                columns, rows = item[GRID].tolist()
                pieces.insert(0, ended_rows(self._states(item[LOCAL]), (columns, rows), end))
            found.append(torch.cat((*pieces, self.separator.vector[None])))
        return found

    def _states(self, images: Tensor) -> Tensor:
        """images [I, 3, side, side] -> [I, rows, columns, H], one after another."""
        return torch.cat([self._projected(self.sam(image[None])) for image in images])

    def _projected(self, states: Tensor) -> Tensor:
        """states [1, rows, columns, size] -> [1, rows, columns, H]."""
        seen = self.clip(states)
        both = torch.cat((seen, states), dim=-1).flatten(0, 2)
        return self.projector(both).view(*states.shape[:3], -1)


class ClipOfStates(Layer):
    """CLIP's tower, without its last norm, on the states of another one.

    Args:
        stated: its part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        self.size, heads = settings.integer("width"), settings.integer("heads")
        self.side = settings.integer("image_size") // settings.integer("patch_size")
        self.ops = context.ops
        inner = f"{name}.embeddings"
        self.first = Vector(f"{inner}.class_embedding", self.size)
        shape = self.side**2 + 1, self.size
        self.positions = Vector(f"{inner}.position_embedding.weight", *shape)
        self.first_norm = LayerNorm(context, f"{name}.pre_layrnorm", self.size, _EPS)
        self.layers = [
            _block(context, (self.size, heads), f"{name}.transformer.layers.{index}")
            for index in range(settings.integer("layers", maximum=MAX_LAYERS))
        ]

    def __call__(self, states: Tensor) -> Tensor:
        """states [1, rows, columns, size] -> the same shape."""
        _, rows, columns, size = states.shape
        first = self.positions.vector[:1] + self.first.vector
        placed = states.view(-1, size) + self._placed(rows, columns)
        x = self.first_norm(torch.cat((first, placed)))
        segments, residual = Segments.of([len(x)], x.device), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        x = x if residual is None else self.ops.add(x, residual)
        return x[1:].view(states.shape)

    def _placed(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, size]: the table of places, resized by areas where it becomes smaller."""
        table = self.positions.vector[1:]
        if rows == columns == self.side:
            return table
        square = table.view(1, self.side, self.side, -1).permute(0, 3, 1, 2).float()
        found = functional.interpolate(square, (rows, columns), mode="bicubic", antialias=True)
        return found[0].flatten(1).T.to(table.dtype)


def _block(context: BuildContext, sizes: tuple[int, int], name: str) -> VisionBlock:
    """
    Args:
        sizes: hidden size, and number of heads.
    """
    hidden, heads = sizes
    attention = VisionAttention(
        context,
        f"{name}.self_attn",
        hidden_size=hidden,
        num_heads=heads,
        names=(("qkv_proj",), "out_proj"),
    )
    norms = [LayerNorm(context, f"{name}.layer_norm{which}", hidden, _EPS) for which in (1, 2)]
    mlp = QuickMLP(context, f"{name}.mlp.fc1", f"{name}.mlp.fc2", hidden, 4 * hidden)
    return VisionBlock(norms[0], attention, norms[1], mlp)
