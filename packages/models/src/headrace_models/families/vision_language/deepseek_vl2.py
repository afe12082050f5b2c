"""DeepSeek-VL2: an image in small and its tiles through SigLIP, four patches a vector, in front of DeepSeek's
mixtures of experts.

Wu et al. 2024, arXiv:2412.10302.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Slot
from headrace_models.layers.documents.tile_rows import ended_rows
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.clip import ClipTower, Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision", "projector.layers"
_DEFAULTS: Mapping[str, Any] = {
    "image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4,
}  # fmt: skip
"""Values of the tower that configs may leave out."""
_RATIO = 2
"""Patches of a vector, in a row and in a column."""
GRID = "patches_grid"
"""Model input: [2] int64, columns and rows of tiles."""


class PlacesTable(Embedding):
    """Stored with an axis of 1 in front."""

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((1, self.num_rows, self.size))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"][0]


class DeepseekVL2(MediaDecoder):
    """Rows of states end with a vector of their own; another stands between the image in small and its
    tiles."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_TOWER}.patch_embed.proj", "tower.patches"),
        WeightRule(f"{_TOWER}.pos_embed", "tower.positions.weight"),
        WeightRule(f"{_TOWER}.norm", "tower.last_norm"),
        *(
            WeightRule(f"{_TOWER}.blocks.{{}}.{source}", f"tower.layers.{{}}.{target}")
            for source, target in [
                ("norm1", "attention_norm"), ("attn.proj", "attention.out"), ("norm2", "mlp_norm"),
                ("mlp.fc1", "mlp.up"), ("mlp.fc2", "mlp.down"),
            ]
        ),
        WeightRule(f"{_TOWER}.blocks.{{}}.attn.qkv", "tower.layers.{}.attention.qkv", split=()),
        WeightRule(f"{_PROJECTOR}.0", "projector.up"),
        WeightRule(f"{_PROJECTOR}.2", "projector.down"),
        WeightRule("image_newline", "newline.vector"),
        WeightRule("view_seperator", "separator.vector"),
    )  # fmt: skip

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        Settings(whole).choice("tile_tag", ("2D",), "2D")
        Settings(whole).choice("global_view_pos", ("head",), "head")
        stated = _tower_settings(part_of(whole, "vision_config"))
        self.tower = ClipTower(context, stated, _TOWER, final_norm=True)
        places, size = self.tower.side**2, stated["hidden_size"]
        self.tower.positions = PlacesTable(context, f"{_TOWER}.pos_embed", places, size)
        between = _between(part_of(whole, "projector_config"), self.hidden_size())
        sizes = size * _RATIO**2, between, self.hidden_size()
        self.projector = Projector(context, f"{_PROJECTOR}.0", f"{_PROJECTOR}.2", sizes, "gelu")
        self.newline = Vector("image_newline", self.hidden_size())
        self.separator = Vector("view_seperator", self.hidden_size())

    def unread_weights(self) -> Mapping[str, str]:
        """What the tower says of a whole image."""
        return {r"vision\.attn_pool\..*": "of a vector for a whole image, which is not taken"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [1 + tiles, 3, side, side], the image in small first; :data:`GRID`.
        """
        found, end = [], self.newline.vector
        for item in inputs:
            columns, rows = item[GRID].tolist()
            states = torch.cat([self._states(image) for image in item["pixel_values"]])
            small = ended_rows(states[:1], (1, 1), end)
            tiles = ended_rows(states[1:], (columns, rows), end)
            found.append(torch.cat((small, self.separator.vector[None], tiles)))
        return found

    def _states(self, image: Tensor) -> Tensor:
        """image [3, side, side] -> [1, rows, columns, H]."""
        states, side = self.tower(image[None]), self.tower.side
        plane = states.view(side, side, -1).permute(2, 0, 1)
        rest = -side % _RATIO
        plane = functional.pad(plane, (0, rest, 0, rest))
        units = functional.unfold(plane[None], _RATIO, stride=_RATIO)[0].T
        short = (side + rest) // _RATIO
        return self.projector(units.contiguous()).view(1, short, short, -1)


def _tower_settings(vision: Mapping[str, Any]) -> dict[str, Any]:
    """A tower's part of the config, in the words of SigLIP's.

    Raises: UnsupportedModel: it is another kind of tower.
    """
    settings = Settings({**_DEFAULTS, **vision})
    settings.refuse("class_token", False)
    settings.refuse("ignore_head", True)
    settings.choice("global_pool", ("map", ""), "map")
    width = settings.integer("width")
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": width,
        "intermediate_size": int(width * settings.positive("mlp_ratio", 4.0)),
        "num_hidden_layers": settings.integer("layers"),
        "num_attention_heads": settings.integer("heads"),
        "image_size": settings.integer("image_size"),
        "patch_size": settings.integer("patch_size"),
    }


def _between(projector: Mapping[str, Any], hidden_size: int) -> int:
    """Columns between the projector's two products.

    Raises: UnsupportedModel: it is another kind of projector.
    """
    settings = Settings(projector)
    kind = "downsample_mlp_gelu"
    settings.choice("projector_type", (kind,), kind)
    settings.refuse("depth", 2)
    settings.refuse("downsample_ratio", _RATIO)
    settings.refuse("token_pooling", False)
    settings.refuse("n_embed", hidden_size)
    return hidden_size * settings.integer("mlp_ratio", 1)
