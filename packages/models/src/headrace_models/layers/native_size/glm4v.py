"""The tower of GLM-4.1V, GLM-4.5V and GLM-OCR: patches of images of any size, rotation in two dimensions, a
convolution that makes one vector of four neighbours, and a gated layer behind it.

GLM-V Team 2025, arXiv:2507.01006.

Patches come in the order of the convolution: those that become one vector are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.native_size.grid_tower import GridTower
from headrace_models.layers.native_size.stretched import stretched
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.axes import axial_theta, places
from headrace_models.layers.vision.blocks import VisionAttention, VisionBlock
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.qwen_vl import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_MERGER_EPS = 1e-5
_FUSED = (("qkv",), "proj")
_DEFAULTS: Mapping[str, Any] = {
    "depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "in_channels": 3,
    "image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
_OCR_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
}  # fmt: skip
"""Values that configs may leave out."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of both towers: their names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.layers.{{}}"
    gated = ((block, f"{own}.mlp", "mlp."), (f"{source}.merger", f"{target}.merger.mlp", ""))
    return (
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{source}.post_conv_layernorm", f"{target}.patches_norm"),
        WeightRule(f"{source}.embeddings.position_embedding", f"{target}.positions"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.q_norm", f"{own}.attention.query_norm"),
        WeightRule(f"{block}.attn.k_norm", f"{own}.attention.key_norm"),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        *(
            WeightRule(f"{theirs}.{below}{name}", f"{ours}.{part}", part=index)
            for theirs, ours, below in gated
            for name, part, index in (
                ("gate_proj", "gate_up", 0), ("up_proj", "gate_up", 1), ("down_proj", "down", 0),
            )
        ),
        WeightRule(f"{source}.post_layernorm", f"{target}.final_norm"),
        WeightRule(f"{source}.downsample", f"{target}.downsample"),
        WeightRule(f"{source}.merger.proj", f"{target}.merger.projection"),
        WeightRule(f"{source}.merger.post_projection_norm", f"{target}.merger.norm"),
    )  # fmt: skip


class Glm4vMerger(Layer):
    """Projection, norm, GELU, and a gated layer that is not added to what comes in.

    Args:
        name: as the checkpoint spells it.
        size: of a vector.
        inner: width of the gated layer.
    """

    def __init__(
        self, context: BuildContext, name: str, size: int, inner: int, activation: str
    ) -> None:
        self.ops = context.ops
        self.projection = Linear(context, f"{name}.proj", size, [Part(size)], bias=False)
        self.norm = LayerNorm(context, f"{name}.post_projection_norm", size, _MERGER_EPS)
        self.mlp = GatedMLP(context, name, size, inner, activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, size] -> the same shape."""
        return self.mlp(self.ops.activation(self.norm(self.projection(x)), "gelu"))


class Glm4vTower(GridTower):
    """Patches -> a vector for every four of them.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        out_size: of a vector.
        ocr: the tower is GLM-OCR's: heads have norms, and positions are those of the rotation alone.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        out_size: int,
        *,
        ocr: bool = False,
    ) -> None:
        settings = Settings({**(_OCR_DEFAULTS if ocr else _DEFAULTS), **stated})
        hidden, heads = settings.integer("hidden_size"), settings.integer("num_heads")
        merge, self.patch = (settings.integer(key) for key in ("spatial_merge_size", "patch_size"))
        super().__init__(context, head_dim=hidden // heads, merge=merge, theta=axial_theta(stated))
        _check(settings, out_size)
        frames, channels = (settings.integer(key) for key in ("temporal_patch_size", "in_channels"))
        kernel = (channels, frames, self.patch, self.patch)
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embed.proj", kernel, hidden, bias=True
        )
        eps = settings.number("rms_norm_eps")
        self.patches_norm: RMSNorm | None = None
        self.positions: Embedding | None = None
        if not ocr:
            self.patches_norm = RMSNorm(context, f"{name}.post_conv_layernorm", hidden, eps)
            self.side = settings.integer("image_size") // self.patch
            table = f"{name}.embeddings.position_embedding"
            self.positions = Embedding(context, table, self.side**2, hidden)
        inner = settings.integer("intermediate_size") if ocr else out_size
        self.layers = [
            _block(context, settings, f"{name}.blocks.{index}", inner, ocr=ocr)
            for index in range(settings.integer("depth", maximum=MAX_LAYERS))
        ]
        self.final_norm = RMSNorm(context, f"{name}.post_layernorm", hidden, eps)
        square = (hidden, merge, merge)
        self.downsample = PatchEmbedding(context, f"{name}.downsample", square, out_size, bias=True)
        behind = out_size * channels if ocr else settings.integer("intermediate_size")
        activation = settings.activation("hidden_act")
        self.merger = Glm4vMerger(context, f"{name}.merger", out_size, behind, activation)

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Encode items of any sizes at once; they do not see each other.

        Args:
            patches: [time * height * width, channels * frames * patch * patch] each.

        Returns:
            [time * height * width / merge ** 2, out_size] each.
        """
        x = self.patches(torch.cat(list(patches)).to(self.dtype))
        if self.patches_norm is not None and self.positions is not None:
            table = self.positions.weight.view(self.side, self.side, -1)
            found = torch.cat([self._positions(table, grid) for grid in grids])
            x = self.patches_norm(x) + found.to(x.dtype)
        x, residual = self.run(x, grids)
        x, _ = self.final_norm.add(x, residual)
        squares = x.view(-1, self.merge**2, x.shape[1]).transpose(1, 2).flatten(1)
        return self.split(self.merger(self.downsample(squares)), grids)

    def _positions(self, table: Tensor, grid: Grid) -> Tensor:
        """[T, hidden] float32: the table, stretched to an item's frames."""
        time, height, width = grid
        rows, columns = places(height, width, self.merge).to(table.device).unbind(-1)
        return stretched(table, height, width)[rows, columns].repeat(time, 1)


def _check(settings: Settings, out_size: int) -> None:
    """Raises: UnsupportedModel: vectors are not the decoder's."""
    stated = settings.integer("out_hidden_size", out_size)
    if stated != out_size:
        raise UnsupportedModel(
            f"config.json: vision_config.out_hidden_size = {stated}: must be {out_size}, the hidden_size of "
            "the language model"
        )


def _block(
    context: BuildContext, settings: Settings, name: str, inner: int, *, ocr: bool
) -> VisionBlock:
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_heads")
    eps, bias = settings.number("rms_norm_eps"), settings.flag("attention_bias", ocr)
    norms = None
    if ocr:
        query, key = (
            RMSNorm(context, f"{name}.attn.{part}_norm", hidden // heads, eps) for part in "qk"
        )
        norms = query, key
    return VisionBlock(
        RMSNorm(context, f"{name}.norm1", hidden, eps),
        VisionAttention(
            context,
            f"{name}.attn",
            hidden_size=hidden,
            num_heads=heads,
            bias=bias,
            names=_FUSED,
            out_bias=bias and ocr,
            head_norms=norms,
        ),
        RMSNorm(context, f"{name}.norm2", hidden, eps),
        GatedMLP(
            context,
            f"{name}.mlp",
            hidden,
            inner,
            settings.activation("hidden_act"),
            bias=bias and ocr,
        ),
    )
