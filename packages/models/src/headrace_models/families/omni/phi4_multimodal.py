"""Phi-4-multimodal: tiles of an image of which four patches are a vector, and a Conformer for recordings, in
front of Phi-4-mini, which has an adapter for prompts with images and another for prompts with recordings.

Abouelenin et al. 2025, arXiv:2503.01743.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.relative_conformer import (
    RelativeConformer,
    relative_conformer_rules,
)
from headrace_models.layers.base import Layer
from headrace_models.layers.towers import Tower, TowersByModality, rules_of
from headrace_models.layers.vision.anyres import with_row_ends
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.clip import Vector, tower_rules
from headrace_models.layers.vision.towers.margins import TileTower

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_IMAGES, _SOUND = "image_embed", "audio_embed"
_PART = "embed_tokens_extend"
"""Module that holds both in checkpoints."""
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
"""The tower, of which published configs say nothing."""
_AUDIO_NAMES: Mapping[str, str] = {
    "attention_dim": "hidden_size", "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}  # fmt: skip
"""Key of published configs -> of transformers'."""


class TiledImages(Layer):
    """An image is rows of vectors of its tiles, a separator, and rows of the whole; rows have ends."""

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        settings = Settings({**_VISION, **stated})
        last = settings.integer("feature_layer", -2, minimum=-(2**31))
        tower = {**settings.config, "model_type": "siglip_vision_model"}
        self.tower = TileTower(context, tower, f"{name}.img_processor", last=last)
        settings.refuse("crop_size", self.tower.image_size)
        if self.tower.side % 2:
            raise UnsupportedModel(
                f"config.json: vision_config.image_size = {self.tower.image_size}: must be an even number of "
                f"patches of {self.tower.patch}"
            )
        size = self.tower.positions.size
        self.between = Vector(f"{name}.global_img_feature_extensor", 1, 1, size)
        self.row_end = Vector(f"{name}.sub_img_feature_extensor", 1, 1, 1, size)
        names = f"{name}.img_projection_up", f"{name}.img_projection_down"
        self.projector = Projector(context, *names, (size, out_size, out_size), "gelu")

    def embed(self, modality: str, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """See :class:`headrace_models.layers.towers.MediaEncoder`.

        Args:
            inputs: ``pixel_values`` [1 + tiles, 3, side, side], the whole first, ``image_grid`` [2], rows and
                columns of tiles, and ``image_patches`` [2], those of patches that are of the image, each.
        """
        sizes = [(*item["image_grid"].tolist(), *item["image_patches"].tolist()) for item in inputs]
        kept = [size for own in sizes for size in self._kept(*own)]
        pooled = iter(self.tower.pooled(torch.cat([item["pixel_values"] for item in inputs]), kept))
        found = [
            self._rows(list(itertools.islice(pooled, 1 + rows * columns)), columns)
            for rows, columns, *_ in sizes
        ]
        return torch.split(self.projector(torch.cat(found)), [len(rows) for rows in found])

    def _kept(self, rows: int, columns: int, height: int, width: int) -> list[tuple[int, int]]:
        """Rows and columns of each tile's patches that are of the image, the whole's first."""
        side = self.tower.side
        heights, widths = (
            [min(max(size - at * side, 0), side) for at in range(number)]
            for number, size in ((rows, height), (columns, width))
        )
        return [(side, side), *itertools.product(heights, widths)]

    def _rows(self, pooled: Sequence[Tensor], columns: int) -> Tensor:
        """pooled [1 + tiles] of [rows, columns, H] -> [vectors, H]."""
        end, (whole, *tiles) = self.row_end.vector.flatten(), pooled
        firsts = range(0, len(tiles), columns)
        rows = [torch.cat(tiles[first : first + columns], dim=1) for first in firsts]
        canvas = torch.cat([row for row in rows if len(row)])
        parts = (with_row_ends(canvas, end), self.between.vector[0], with_row_ends(whole, end))
        return torch.cat(parts)


class HeardRecordings(Layer):
    """A state is a vector; it is another one beside images."""

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        Settings(stated).refuse("downsample_rate", 1)
        self.encoder = RelativeConformer(context, stated, f"{name}.encoder")
        self.alone, self.beside_images = (
            Projector(
                context,
                f"{name}.up_proj_for_{which}",
                f"{name}.down_proj_for_{which}",
                (self.encoder.size, out_size, out_size),
                "gelu",
            )
            for which in ("speech", "vision_speech")
        )

    def embed(self, modality: str, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """See :class:`headrace_models.layers.towers.MediaEncoder`.

        Args:
            inputs: ``input_features`` [frames, bins] and ``beside_images`` [1], 1 if the prompt has images,
                each.
        """
        return [
            (self.beside_images if item["beside_images"].item() else self.alone)(
                self.encoder(item["input_features"])
            )
            for item in inputs
        ]


def _projector_rules(name: str, which: str, target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{name}.up_proj_for_{which}", f"{target}.up"),
        WeightRule(f"{name}.down_proj_for_{which}", f"{target}.down"),
    )


_TOWERS = (
    Tower(
        "vision_config",
        ("image",),
        _IMAGES,
        (
            *tower_rules(f"{_IMAGES}.img_processor", f"{_IMAGES}.tower"),
            WeightRule(f"{_IMAGES}.global_img_feature_extensor", f"{_IMAGES}.between.vector"),
            WeightRule(f"{_IMAGES}.sub_img_feature_extensor", f"{_IMAGES}.row_end.vector"),
            WeightRule(f"{_IMAGES}.img_projection_up", f"{_IMAGES}.projector.up"),
            WeightRule(f"{_IMAGES}.img_projection_down", f"{_IMAGES}.projector.down"),
        ),
        TiledImages,
    ),
    Tower(
        "audio_config",
        ("audio",),
        _SOUND,
        (
            *relative_conformer_rules(f"{_SOUND}.encoder", f"{_SOUND}.encoder"),
            *_projector_rules(_SOUND, "speech", f"{_SOUND}.alone"),
            *_projector_rules(_SOUND, "vision_speech", f"{_SOUND}.beside_images"),
        ),
        HeardRecordings,
    ),
)


class Phi4Multimodal(TowersByModality):
    """See the module. The engine gives prompts their adapters
    (:mod:`headrace_models.lora.beside_weights`)."""

    towers: ClassVar[Sequence[Tower]] = _TOWERS
    media_rules: ClassVar[Sequence[WeightRule]] = rules_of(_TOWERS)
    media_names: ClassVar[Sequence[tuple[str, str]]] = ((f"{_PART}.", ""),)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        super().make_towers(context, _in_parts(whole))

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of the tower behind the layer that is read, too."""
        images: TiledImages | None = getattr(self, _IMAGES, None)
        if images is None:
            return super().unread_weights()
        why, tower = "behind the layer of the tower that is read", rf"{_IMAGES}\.img_processor"
        unused = range(len(images.tower.layers), images.tower.num_layers)
        own = {rf"{tower}\.encoder\.layers\.{index}\..*": why for index in unused}
        return {**super().unread_weights(), **own, rf"{tower}\.(post_layernorm|head)\..*": why}


def _in_parts(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config as transformers has it: published ones have other keys, and leave the tower for images to be
    known.

    Raises: UnsupportedModel: images are joined otherwise.
    """
    found = {key: whole[key] for key in ("vision_config", "audio_config") if key in whole}
    if "embd_layer" in whole:
        images = Settings(part_of(part_of(whole, "embd_layer"), "image_embd_layer"))
        images.choice("hd_transform_order", ("sub_glb",), "glb_sub")
        images.choice("image_token_compression_cls", ("avg_pool_2d",), "")
        found["vision_config"] = {"crop_size": images.config.get("crop_size")}
    if "audio_processor" in whole:
        stated = dict(part_of(part_of(whole, "audio_processor"), "config"))
        for key, name in _AUDIO_NAMES.items():
            if key in stated:
                stated[name] = stated.pop(key)
        convolutions = Settings(stated).config.get("nemo_conv_settings") or {}
        distances = Settings(stated).config.get("relative_attention_bias_args") or {}
        for part, key, name in (
            (convolutions, "conv_channels", "nemo_conv_channels"),
            (distances, "t5_bias_max_distance", "bias_max_distance"),
        ):
            if isinstance(part, Mapping) and key in part:
                stated[name] = part[key]
        found["audio_config"] = stated
    return found
