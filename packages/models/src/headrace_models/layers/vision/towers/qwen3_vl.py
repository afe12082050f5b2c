"""The tower of Qwen3-VL: patches of images of any size, learned positions that are stretched to it, rotation
in two dimensions, and mergers that make one vector of four neighbours: behind the last block, and behind
inner ones, for the decoder's first layers.

Bai et al. 2025, arXiv:2511.21631; Meng et al. 2024, arXiv:2406.04334 (features for several layers).

Patches come in the order of the mergers: four that become one vector are adjacent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.axes import axial_theta, frequencies, places, rotary_rows
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import Projector, vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.qwen_vl import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6
_FUSED = (("qkv",), "proj")
_DEFAULTS: Mapping[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
"""Values that configs may leave out."""


class MergerNames(NamedTuple):
    """Names of the mergers' modules in a checkpoint."""

    inner: str = "deepstack_merger_list"
    norm: str = "norm"
    up: str = "linear_fc1"
    down: str = "linear_fc2"


NAMES = MergerNames()


def tower_rules(source: str, target: str, names: MergerNames = NAMES) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Qwen3VLTower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}", f"{target}.layers.{{}}"
    mergers = ((f"{source}.merger", f"{target}.merger"),
               (f"{source}.{names.inner}.{{}}", f"{target}.inner_mergers.{{}}"))  # fmt: skip
    return (
        WeightRule(f"{source}.patch_embed.proj", f"{target}.patches"),
        WeightRule(f"{source}.pos_embed", f"{target}.positions"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.linear_fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.linear_fc2", f"{own}.mlp.down"),
        *(
            WeightRule(f"{theirs}.{name}", f"{ours}.{part}")
            for theirs, ours in mergers
            for name, part in (
                (names.norm, "norm"), (names.up, "mlp.up"), (names.down, "mlp.down"),
            )
        ),
    )  # fmt: skip


class Merger(Layer):
    """A vector of adjacent patches: norm and MLP.

    Args:
        name: as the checkpoint spells it.
        sizes: of a patch's state, of adjacent ones together, and of the vector.
        joined: the norm is of the adjacent states together, not of each.
        names: of its modules.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: tuple[int, int, int],
        *,
        joined: bool,
        names: MergerNames,
    ) -> None:
        state, unit, size = sizes
        self.unit = unit
        self.norm = LayerNorm(context, f"{name}.{names.norm}", unit if joined else state, _EPS)
        inner = (unit, unit, size)
        self.mlp = Projector(context, f"{name}.{names.up}", f"{name}.{names.down}", inner, "gelu")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, sizes[0]] -> [T * sizes[0] / sizes[1], sizes[2]]."""
        return self.mlp(self.norm(x.view(-1, self.norm.size)).view(-1, self.unit))


class Qwen3VLTower(Layer):
    """Patches -> for every four of them a vector, and one more for each inner merger.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        out_size: of a vector.
        names: of the mergers' modules.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        out_size: int,
        names: MergerNames = NAMES,
    ) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        hidden, heads = settings.integer("hidden_size"), settings.integer("num_heads")
        self.head_dim, self.patch = hidden // heads, settings.integer("patch_size")
        self.merge, self.theta = settings.integer("spatial_merge_size"), axial_theta(stated)
        if not self.head_dim or self.head_dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config: heads of {self.head_dim} numbers do not turn by two axes"
            )
        self.ops, self.device = context.ops, context.device
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        frames = settings.integer("temporal_patch_size")
        kernel = (settings.integer("in_channels"), frames, self.patch, self.patch)
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embed.proj", kernel, hidden, bias=True
        )
        count = settings.integer("num_position_embeddings")
        self.side = int(count**0.5)
        self.positions = Embedding(context, f"{name}.pos_embed", count, hidden)
        depth = settings.integer("depth", maximum=MAX_LAYERS)
        self.layers = [
            _block(context, settings, f"{name}.blocks.{index}") for index in range(depth)
        ]
        sizes = (hidden, hidden * self.merge**2, out_size)
        self.merger = Merger(context, f"{name}.merger", sizes, joined=False, names=names)
        self.inner = _inner_layers(settings, depth)
        self.inner_mergers = [
            Merger(context, f"{name}.{names.inner}.{index}", sizes, joined=True, names=names)
            for index in range(len(self.inner))
        ]

    def __call__(self, patches: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Encode items of any sizes at once; they do not see each other.

        Args:
            patches: [time * height * width, channels * frames * patch * patch] each.

        Returns:
            [time * height * width / merge ** 2, out_size * (1 + inner mergers)] each: the last block's
            vectors, then the inner ones', in the order of the blocks.
        """
        x = self.patches(torch.cat(list(patches)).to(self.dtype))
        x = x + torch.cat([self._positions(grid) for grid in grids]).to(x.dtype)
        rotary = torch.cat([self._rotary(grid) for grid in grids]).to(x.device)
        segments = Segments.of([h * w for t, h, w in grids for _ in range(t)], x.device)
        residual: Tensor | None = None
        levels: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, segments, rotary)
            if index in self.inner:
                x, residual = self.ops.add(x, residual), None
                levels.append(self.inner_mergers[self.inner.index(index)](x))
        if residual is not None:
            x = self.ops.add(x, residual)
        vectors = torch.cat((self.merger(x), *levels), dim=-1)
        return list(torch.split(vectors, [t * h * w // self.merge**2 for t, h, w in grids]))

    def _rotary(self, grid: Grid) -> Tensor:
        """[T, D]: cosines and sines of patches, a quarter of the numbers by row and a quarter by column."""
        time, height, width = grid
        turning = frequencies(self.theta, self.head_dim // 4)
        return rotary_rows(places(height, width, self.merge), turning, turning).repeat(time, 1)

    def _positions(self, grid: Grid) -> Tensor:
        """[T, hidden] float32: the table as a square, stretched to the item's frames so that corners meet,
        and read between its rows and columns."""
        time, height, width = grid
        at, table = places(height, width, self.merge), self.positions.weight
        rows, columns = self._taps(at[:, 0], height), self._taps(at[:, 1], width)
        found = torch.zeros(len(at), table.shape[1], device=table.device)
        for (row, by_row), (column, by_column) in itertools.product(rows, columns):
            index = (row * self.side + column).to(table.device)
            found += table[index].float() * (by_row * by_column)[:, None].to(table.device)
        return found.repeat(time, 1)

    def _taps(self, index: Tensor, size: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Two lines of the table on both sides of an item's lines, each with its share."""
        exact = index.float() * (self.side - 1) / max(size - 1, 1)
        low = exact.floor()
        share, first = exact - low, low.long()
        return (first, 1 - share), ((first + 1).clamp(max=self.side - 1), share)


def _inner_layers(settings: Settings, depth: int) -> list[int]:
    """Blocks that a merger stands behind, in the order of the checkpoint's mergers.

    Raises: UnsupportedModel: they are no different blocks of the tower.
    """
    layers = list(settings.integers("deepstack_visual_indexes"))
    if len(set(layers)) != len(layers) or any(layer >= depth for layer in layers):
        raise UnsupportedModel(
            f"config.json: vision_config.deepstack_visual_indexes = {layers}: must be different layers "
            f"of the tower's {depth}"
        )
    return layers


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    hidden, inner = settings.integer("hidden_size"), settings.integer("intermediate_size")
    return VisionBlock(
        LayerNorm(context, f"{name}.norm1", hidden, _EPS),
        VisionAttention(
            context,
            f"{name}.attn",
            hidden_size=hidden,
            num_heads=settings.integer("num_heads"),
            names=_FUSED,
        ),
        LayerNorm(context, f"{name}.norm2", hidden, _EPS),
        vision_mlp(
            context, settings, f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2", (hidden, inner)
        ),
    )
