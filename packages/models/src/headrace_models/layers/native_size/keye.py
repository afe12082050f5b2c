"""The tower of Keye-VL and Ovis 2.5: SigLIP's on patches of images of any size, with learned positions that
are stretched to it, and rotation in two dimensions.

Kwai Keye Team 2025, arXiv:2507.01949; Lu et al. 2025, arXiv:2508.11737.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.native_size.grid_tower import GridTower
from headrace_models.layers.native_size.stretched import stretched
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.axes import axial_theta, places
from headrace_models.layers.vision.blocks import block_rules, pre_norm_block
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.qwen_vl import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 384, "patch_size": 14, "spatial_merge_size": 2,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
"""Values that configs may leave out."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`KeyeTower`: its names in the checkpoint and in the model."""
    return (
        WeightRule(f"{source}.embeddings.patch_embedding", f"{target}.patches"),
        WeightRule(f"{source}.embeddings.position_embedding", f"{target}.positions"),
        *block_rules(f"{source}.encoder.layers.{{}}", f"{target}.layers.{{}}"),
        WeightRule(f"{source}.post_layernorm", f"{target}.final_norm"),
    )


class KeyeTower(GridTower):
    """Patches -> their states, those of each square of four one after the other.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        cubic: how the table of positions is stretched.
        last_norm: there is a norm behind the last block.
        joins_frames: see :class:`GridTower`.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        *,
        cubic: bool = False,
        last_norm: bool = True,
        joins_frames: bool = False,
    ) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        self.size, eps = settings.integer("hidden_size"), settings.number("layer_norm_eps")
        super().__init__(
            context,
            head_dim=self.size // settings.integer("num_attention_heads"),
            merge=settings.integer("spatial_merge_size"),
            theta=axial_theta(stated),
            joins_frames=joins_frames,
        )
        patch = settings.integer("patch_size")
        kernel = (settings.integer("num_channels"), patch, patch)
        embed = f"{name}.embeddings"
        self.patches = PatchEmbedding(
            context, f"{embed}.patch_embedding", kernel, self.size, bias=True
        )
        self.side, self.cubic = settings.integer("image_size") // patch, cubic
        table = f"{embed}.position_embedding"
        self.positions = Embedding(context, table, self.side**2, self.size)
        self.layers = [
            pre_norm_block(context, settings, f"{name}.encoder.layers.{index}", eps)
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        norm = f"{name}.post_layernorm"
        self.final_norm = LayerNorm(context, norm, self.size, eps) if last_norm else None

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        """Encode images of any sizes at once; they do not see each other.

        Args:
            patches: [height * width, channels * patch * patch] each.

        Returns:
            [all patches, size].
        """
        x = self.patches(torch.cat(list(patches)).to(self.dtype))
        x = x + torch.cat([self._positions(grid) for grid in grids]).to(x.dtype)
        x, residual = self.run(x, grids)
        if self.final_norm is not None:
            return self.final_norm.add(x, residual)[0]
        return x if residual is None else self.ops.add(x, residual)

    def _positions(self, grid: Grid) -> Tensor:
        """[T, size] float32: the table, stretched to an image."""
        time, height, width = grid
        table = self.positions.weight.view(self.side, self.side, -1)
        rows, columns = places(height, width, self.merge).to(table.device).unbind(-1)
        return stretched(table, height, width, cubic=self.cubic)[rows, columns].repeat(time, 1)
