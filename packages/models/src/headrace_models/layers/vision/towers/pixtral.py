"""The tower of Pixtral: patches of images of any size in one sequence, rotation in two dimensions, RMS
norms and gated layers.

Agrawal et al. 2024, arXiv:2410.07073.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.axes import axial_theta, frequencies, places, rotary_rows
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-5
_NAMES = (("q_proj", "k_proj", "v_proj"), "o_proj")
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
"""Values that configs may leave out."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`PixtralTower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.transformer.layers.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.patch_conv", f"{target}.patches"),
        WeightRule(f"{source}.ln_pre", f"{target}.first_norm"),
        WeightRule(f"{block}.attention_norm", f"{own}.attention_norm"),
        WeightRule(f"{block}.attention.q_proj", f"{own}.attention.qkv", part=0),
        WeightRule(f"{block}.attention.k_proj", f"{own}.attention.qkv", part=1),
        WeightRule(f"{block}.attention.v_proj", f"{own}.attention.qkv", part=2),
        WeightRule(f"{block}.attention.o_proj", f"{own}.attention.out"),
        WeightRule(f"{block}.ffn_norm", f"{own}.mlp_norm"),
        WeightRule(f"{block}.feed_forward.gate_proj", f"{own}.mlp.gate_up", part=0),
        WeightRule(f"{block}.feed_forward.up_proj", f"{own}.mlp.gate_up", part=1),
        WeightRule(f"{block}.feed_forward.down_proj", f"{own}.mlp.down"),
    )


class PixtralTower(Layer):
    """Images of any sizes -> the states of their patches.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        last: the layer whose output is wanted, counted as transformers counts hidden states: 0 is the
            blocks' input, -1 the last block's output.
    """

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, *, last: int = -1
    ) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        self.size = settings.integer("hidden_size")
        self.patch = settings.integer("patch_size")
        self.head_dim = self.size // settings.integer("num_attention_heads")
        if self.head_dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config: heads of {self.head_dim} numbers do not turn by two axes"
            )
        self.name = name
        self.num_layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        wanted = last if last >= 0 else self.num_layers + 1 + last
        if not 0 <= wanted <= self.num_layers:
            raise UnsupportedModel(
                f"config.json: vision_feature_layer = {last}: the tower has {self.num_layers} layers"
            )
        self.theta = axial_theta(stated)
        self.ops, self.device = context.ops, context.device
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        kernel = (settings.integer("num_channels"), self.patch, self.patch)
        self.patches = PatchEmbedding(context, f"{name}.patch_conv", kernel, self.size, bias=False)
        self.first_norm = RMSNorm(context, f"{name}.ln_pre", self.size, _EPS)
        self.layers = [
            _block(context, settings, f"{name}.transformer.layers.{index}")
            for index in range(wanted)
        ]

    @property
    def unused(self) -> Mapping[str, str]:
        """Names of tensors that are not read -> why."""
        why = "behind the layer of the tower that is read"
        unused = range(len(self.layers), self.num_layers)
        return {rf"{self.name}\.transformer\.layers\.{index}\..*": why for index in unused}

    def grid(self, image: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches of an image [3, height, width]."""
        return image.shape[1] // self.patch, image.shape[2] // self.patch

    def __call__(self, images: Sequence[Tensor]) -> list[Tensor]:
        """images [3, height, width] each -> [rows * columns, H] each; they do not see each other."""
        grids = [self.grid(image) for image in images]
        flat = [in_patches(image[None].to(self.dtype), self.patch)[0] for image in images]
        x = self.first_norm(self.patches(torch.cat(flat)))
        sizes = [rows * columns for rows, columns in grids]
        rotary = torch.cat([self._rotary(*grid) for grid in grids]).to(x.device)
        segments, residual = Segments.of(sizes, x.device), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments, rotary)
        if residual is not None:
            x = self.ops.add(x, residual)
        return list(torch.split(x, sizes))

    def _rotary(self, rows: int, columns: int) -> Tensor:
        """[T, D]: of a head's frequencies every second turns by row, the others by column."""
        by_row, by_column = (frequencies(self.theta, self.head_dim // 2, i, 2) for i in range(2))
        return rotary_rows(places(rows, columns), by_row, by_column)


def feature_layer(whole: Mapping[str, Any], default: int) -> int:
    """``vision_feature_layer`` of a config.

    Raises: UnsupportedModel: it is not one layer.
    """
    layer = whole.get("vision_feature_layer", default)
    if type(layer) is not int:
        raise UnsupportedModel(f"config.json: vision_feature_layer = {layer!r}: must be one layer")
    return layer


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    hidden = settings.integer("hidden_size")
    return VisionBlock(
        RMSNorm(context, f"{name}.attention_norm", hidden, _EPS),
        VisionAttention(
            context,
            f"{name}.attention",
            hidden_size=hidden,
            num_heads=settings.integer("num_attention_heads"),
            bias=False,
            names=_NAMES,
        ),
        RMSNorm(context, f"{name}.ffn_norm", hidden, _EPS),
        GatedMLP(
            context,
            f"{name}.feed_forward",
            hidden,
            settings.integer("intermediate_size"),
            settings.activation("hidden_act"),
        ),
    )
