"""The tower of ERNIE 4.5 VL: patches of images of any size, rotation in two dimensions, and a resampler that
makes one vector of four neighbours in two frames; a still image fills both.

Baidu 2025, ERNIE 4.5 technical report, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.native_size.grid_tower import GridTower
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.axes import axial_theta
from headrace_models.layers.vision.blocks import VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import Projector, vision_mlp
from headrace_models.layers.vision.towers.qwen_vl import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_FUSED = (("qkv",), "proj")
FRAMES = 2
"""Frames of a vector."""
_HALVES = ("spatial_linear", "temporal_linear")
_DEFAULTS: Mapping[str, Any] = {
    "depth": 32, "hidden_size": 1280, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "hidden_act": "quick_gelu", "rms_norm_eps": 1e-6, "mlp_ratio": 4,
}  # fmt: skip
"""Values that configs may leave out."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of an :class:`ErnieTower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
        WeightRule(f"{source}.ln", f"{target}.final_norm"),
    )


def resampler_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of an :class:`ErnieResampler`."""
    parts = (("0", "mlp.up"), ("2", "mlp.down"), ("3", "norm"))
    return (
        *(
            WeightRule(f"{source}.{half}.{theirs}", f"{target}.{half}.{ours}")
            for half in _HALVES
            for theirs, ours in parts
        ),
        WeightRule(f"{source}.mlp", f"{target}.projection"),
        WeightRule(f"{source}.after_norm", f"{target}.after_norm"),
    )


class ErnieTower(GridTower):
    """Patches -> their states, those of each square of four one after the other.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        self.size, heads = settings.integer("hidden_size"), settings.integer("num_heads")
        self.eps, patch = settings.number("rms_norm_eps"), settings.integer("patch_size")
        super().__init__(
            context,
            head_dim=self.size // heads,
            merge=settings.integer("spatial_merge_size"),
            theta=axial_theta(stated),
        )
        numbers, parts = settings.integer("in_channels") * patch**2, [Part(self.size)]
        self.patches = Linear(context, f"{name}.patch_embed.proj", numbers, parts, bias=False)
        self.layers = [
            self._block(context, settings, f"{name}.blocks.{index}")
            for index in range(settings.integer("depth", maximum=MAX_LAYERS))
        ]
        self.final_norm = LayerNorm(context, f"{name}.ln", self.size, self.eps)

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        """Encode images and videos of any sizes at once; frames do not see each other.

        Args:
            patches: [time * height * width, channels * patch * patch] each.

        Returns:
            [all patches, size].
        """
        x = self.patches(torch.cat(list(patches)).to(self.dtype))
        return self.final_norm.add(*self.run(x, grids))[0]

    def _block(self, context: BuildContext, settings: Settings, name: str) -> VisionBlock:
        inner = settings.config.get("intermediate_size")
        if inner is None:
            inner = int(self.size * settings.number("mlp_ratio"))
        attention = VisionAttention(
            context,
            f"{name}.attn",
            hidden_size=self.size,
            num_heads=settings.integer("num_heads"),
            names=_FUSED,
        )
        return VisionBlock(
            LayerNorm(context, f"{name}.norm1", self.size, self.eps),
            attention,
            LayerNorm(context, f"{name}.norm2", self.size, self.eps),
            vision_mlp(context, settings, f"{name}.mlp.fc1", f"{name}.mlp.fc2", (self.size, inner)),
        )


class ErnieHalf(Layer):
    """MLP, and a norm behind it.

    Args:
        name: as the checkpoint spells it.
        sizes: of what comes and of the result.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: tuple[int, int], eps: float
    ) -> None:
        before, after = sizes
        widths = (before, after, after)
        self.mlp = Projector(context, f"{name}.0", f"{name}.2", widths, "gelu")
        self.norm = LayerNorm(context, f"{name}.3", after, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, sizes[0]] -> [T, sizes[1]]."""
        return self.norm(self.mlp(x))


class ErnieResampler(Layer):
    """States of images -> a vector of the decoder for every four of them; of videos, for every eight: four of
    two frames.

    Args:
        name: as the checkpoint spells it.
        unit: numbers of four states.
        out_size: of a vector.
        eps: of the norms within, and of the last one.
    """

    def __init__(
        self, context: BuildContext, name: str, unit: int, out_size: int, eps: tuple[float, float]
    ) -> None:
        self.unit = unit
        within, last = eps
        self.spatial_linear = ErnieHalf(context, f"{name}.spatial_linear", (unit, unit), within)
        wide = unit * FRAMES
        self.temporal_linear = ErnieHalf(context, f"{name}.temporal_linear", (wide, unit), within)
        self.projection = Linear(context, f"{name}.mlp", unit, [Part(out_size)], bias=True)
        self.after_norm = RMSNorm(context, f"{name}.after_norm", out_size, last)

    def __call__(self, states: Tensor, grids: Sequence[Grid]) -> Tensor:
        """states [T, size] -> [vectors, out_size].

        Args:
            grids: of each item; images are one frame, videos an even number.
        """
        squares = self.spatial_linear(states.view(-1, self.unit))
        counts = [t * h * w * len(squares) // len(states) for t, h, w in grids]
        items = zip(torch.split(squares, counts), grids, strict=True)
        both = torch.cat([_pairs(item, grid[0]) for item, grid in items])
        return self.after_norm(self.projection(self.temporal_linear(both)))


def _pairs(squares: Tensor, time: int) -> Tensor:
    """An item's [squares, size] -> [vectors, 2 * size]: those of two frames beside each other."""
    if time == 1:
        return torch.cat([squares] * FRAMES, dim=1)
    frames = squares.view(time // FRAMES, FRAMES, -1, squares.shape[1])
    return frames.transpose(1, 2).flatten(2).flatten(0, 1)


def check_frames(whole: Mapping[str, Any]) -> None:
    """Raises: UnsupportedModel: a vector is of another number of frames.

    Args:
        whole: ``config.json``.
    """
    vision = whole.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    found = vision.get("temporal_merge_size", whole.get("temporal_conv_size", FRAMES))
    if found != FRAMES:
        raise UnsupportedModel(f"config.json: temporal_merge_size = {found!r}: must be {FRAMES}")
