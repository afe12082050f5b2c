"""The tower of dots.ocr: patches of images of any size, rotation in two dimensions, RMS norms and gated
layers, and a merger that makes one vector of four neighbours.

rednote-hilab 2025, https://github.com/rednote-hilab/dots.ocr; the tower is called NaViT there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.native_size.grid_tower import GridTower
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.blocks import VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.qwen_vl import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_MERGER_EPS = 1e-6
_FUSED = (("qkv",), "proj")
_DEFAULTS: Mapping[str, Any] = {
    "embed_dim": 1536, "hidden_size": 1536, "intermediate_size": 4224, "num_hidden_layers": 42,
    "num_attention_heads": 12, "num_channels": 3, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Values that configs may leave out."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`DotsTower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.patch_embed.patchifier.proj", f"{target}.patches"),
        WeightRule(f"{source}.patch_embed.patchifier.norm", f"{target}.patches_norm"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.gate_up", part=0),
        WeightRule(f"{block}.mlp.fc3", f"{own}.mlp.gate_up", part=1),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
        WeightRule(f"{source}.post_trunk_norm", f"{target}.final_norm"),
        WeightRule(f"{source}.merger.ln_q", f"{target}.merger_norm"),
        WeightRule(f"{source}.merger.mlp.0", f"{target}.merger.up"),
        WeightRule(f"{source}.merger.mlp.2", f"{target}.merger.down"),
    )


class DotsTower(GridTower):
    """Patches -> a vector for every four of them.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        out_size: of a vector.
    """

    def __init__(
        self, context: BuildContext, stated: Mapping[str, Any], name: str, out_size: int
    ) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        _check(settings, out_size)
        size, heads = settings.integer("embed_dim"), settings.integer("num_attention_heads")
        merge, patch = (settings.integer(key) for key in ("spatial_merge_size", "patch_size"))
        super().__init__(context, head_dim=size // heads, merge=merge)
        kernel = (settings.integer("num_channels"), patch, patch)
        embed, eps = f"{name}.patch_embed.patchifier", settings.number("rms_norm_eps")
        self.patches = PatchEmbedding(context, f"{embed}.proj", kernel, size, bias=True)
        self.patches_norm = RMSNorm(context, f"{embed}.norm", size, eps)
        self.layers = [
            _block(context, settings, f"{name}.blocks.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.final_norm: RMSNorm | None = None
        if settings.flag("post_norm", True):
            self.final_norm = RMSNorm(context, f"{name}.post_trunk_norm", size, eps)
        unit = size * merge**2
        self.merger_norm = LayerNorm(context, f"{name}.merger.ln_q", size, _MERGER_EPS)
        inner = f"{name}.merger.mlp"
        self.merger = Projector(context, f"{inner}.0", f"{inner}.2", (unit, unit, out_size), "gelu")

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Encode images of any sizes at once; they do not see each other.

        Args:
            patches: [time * height * width, channels * patch * patch] each.

        Returns:
            [time * height * width / merge ** 2, out_size] each.
        """
        x = self.patches_norm(self.patches(torch.cat(list(patches)).to(self.dtype)))
        x, residual = self.run(x, grids)
        if self.final_norm is not None:
            x, _ = self.final_norm.add(x, residual)
        elif residual is not None:
            x = self.ops.add(x, residual)
        units = self.merger_norm(x).view(-1, self.merge**2 * x.shape[1])
        return self.split(self.merger(units), grids)


def _check(settings: Settings, out_size: int) -> None:
    """Raises: UnsupportedModel: patches are of several frames, or vectors are not the decoder's."""
    for key, only in (("temporal_patch_size", 1), ("hidden_size", out_size)):
        if settings.integer(key) != only:
            raise UnsupportedModel(
                f"config.json: vision_config.{key} = {settings.integer(key)}: must be {only}"
            )


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    size, eps = settings.integer("embed_dim"), settings.number("rms_norm_eps")
    bias = settings.flag("use_bias", False)
    return VisionBlock(
        RMSNorm(context, f"{name}.norm1", size, eps),
        VisionAttention(
            context,
            f"{name}.attn",
            hidden_size=size,
            num_heads=settings.integer("num_attention_heads"),
            bias=bias,
            names=_FUSED,
        ),
        RMSNorm(context, f"{name}.norm2", size, eps),
        GatedMLP(
            context,
            f"{name}.mlp",
            size,
            settings.integer("intermediate_size"),
            "silu",
            bias=bias,
            part_names=("fc1", "fc3"),
            down_name="fc2",
        ),
    )
