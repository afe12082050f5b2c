"""Molmo: overlapping crops of an image through CLIP's tower; of each four patches attention makes a vector.

Deitke et al. 2024, arXiv:2409.17146. Letters: C crops, N patches of a crop, D size of the tower's states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear, column_parallel, row_parallel
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.media_decoder import TABLE_IN_VECTORS, MediaDecoder
from headrace_models.layers.vision.mlp import QuickMLP
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_BACKBONE = "vision_backbone"
_TOWER, _POOL, _PROJECTOR = (
    f"{_BACKBONE}.{part}" for part in ("image_vit", "image_pooling_2d", "image_projector")
)
_BLOCK = f"{_TOWER}.transformer.resblocks"
_VISION: Mapping[str, Any] = {
    "image_default_input_size": [336, 336], "image_patch_size": 14, "image_emb_dim": 1024,
    "image_num_heads": 16, "image_mlp_dim": 4096, "image_num_layers": 23, "image_norm_eps": 1e-5,
}  # fmt: skip
"""Published configs say none of these; the code that came with them does."""
_LAYERS = (-2, -9)
_POOLED = 2
"""Patches of a side that become one vector."""


def _block_rules() -> tuple[WeightRule, ...]:
    source, target = f"{_BLOCK}.{{}}", "tower.layers.{}"
    parts = [(f"attention.w{part}", "attention.qkv", i) for i, part in enumerate("qkv")]
    others = [
        ("attention_norm", "attention_norm"), ("attention.wo", "attention.out"), ("ffn_norm", "mlp_norm"),
        ("feed_forward.w1", "mlp.up"), ("feed_forward.w2", "mlp.down"),
    ]  # fmt: skip
    every = [*parts, *[(own, into, 0) for own, into in others]]
    return tuple(WeightRule(f"{source}.{own}", f"{target}.{into}", i) for own, into, i in every)


class Molmo(MediaDecoder):
    """An image is a small picture of the whole, and crops; tokens between its vectors end rows."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_TOWER}.class_embedding", "tower.first.vector"),
        WeightRule(f"{_TOWER}.positional_embedding", "tower.positions.vector"),
        WeightRule(f"{_TOWER}.patch_embedding", "tower.patches"),
        WeightRule(f"{_TOWER}.pre_ln", "tower.first_norm"),
        *_block_rules(),
        WeightRule(f"{_BACKBONE}.pad_embed", "padding.vector"),
        *(WeightRule(f"{_POOL}.w{part}", f"pool.{part}") for part in "qkvo"),
        WeightRule(f"{_PROJECTOR}.w1", "projector.gate_up", part=0),
        WeightRule(f"{_PROJECTOR}.w3", "projector.gate_up", part=1),
        WeightRule(f"{_PROJECTOR}.w2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.embed.no_adapters = TABLE_IN_VECTORS
        said = whole.get(_BACKBONE)
        settings = Settings({**_VISION, **(said if isinstance(said, Mapping) else {})})
        self.tower = _Tower(context, settings)
        size = self.tower.size
        self.padding = Vector(f"{_BACKBONE}.pad_embed", 2, len(_LAYERS) * size)
        self.pool = _Pool(context, len(_LAYERS) * size, size, self.tower.num_heads)
        between = Settings(whole).integer("intermediate_size", minimum=2) // 2
        self.projector = _Projector(context, (size, between, self.hidden_size()))

    def unread_weights(self) -> Mapping[str, str]:
        """The tower's blocks behind those whose states are taken."""
        unused = range(len(self.tower.layers), self.tower.num_layers)
        why = "behind the layers of the tower that are read"
        return {rf"{re.escape(_BLOCK)}\.{index}\..*": why for index in unused}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [C, N, patch * patch * 3] each; ``image_masks`` [C, N], how much of a
                patch is image; ``places`` [vectors]: those of the crops' vectors that are read, in the
                prompt's order; ``patch_token`` [1], to whose vector they are added.
        """
        states = self.tower(torch.cat([own["pixel_values"] for own in inputs]))
        states = self._marked(states, torch.cat([own["image_masks"] for own in inputs]))
        vectors = self.projector(self.pool(self.tower.squares(states)))
        counts = [len(own["pixel_values"]) * self.tower.num_squares for own in inputs]
        return [
            mine[own["places"]] + self.embed(own["patch_token"])
            for mine, own in zip(torch.split(vectors, counts), inputs, strict=True)
        ]

    def _marked(self, states: Tensor, masks: Tensor) -> Tensor:
        """states [C, N, ...] with what tells patches that are padding, whole or in part."""
        is_empty = (masks == 0)[..., None].to(states)
        is_partial = ((masks < 1) & (masks != 0))[..., None].to(states)
        empty, partial = self.padding.vector
        marked: Tensor = states + empty * is_empty + partial * is_partial
        return marked


class _Tower(Layer):
    """CLIP's, of whose blocks two are read."""

    def __init__(self, context: BuildContext, settings: Settings) -> None:
        size, self.patch = settings.integer("image_emb_dim"), settings.integer("image_patch_size")
        self.size, self.num_heads = size, settings.integer("image_num_heads")
        height, width = settings.integers("image_default_input_size", 2)
        self.grid = height // self.patch, width // self.patch
        self.num_layers = settings.integer("image_num_layers", maximum=MAX_LAYERS)
        self.read = [self.num_layers + layer for layer in _LAYERS]
        if min(self.read) < 0:
            raise UnsupportedModel(
                f"config.json: image_num_layers = {self.num_layers}: must be at least {-min(_LAYERS)}"
            )
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        kernel = (self.patch**2 * 3,)
        self.patches = PatchEmbedding(
            context, f"{_TOWER}.patch_embedding", kernel, size, bias=False
        )
        self.first = Vector(f"{_TOWER}.class_embedding", size)
        number = self.grid[0] * self.grid[1] + 1
        self.positions = Vector(f"{_TOWER}.positional_embedding", number, size)
        self.first_norm = LayerNorm(
            context, f"{_TOWER}.pre_ln", size, settings.number("image_norm_eps")
        )
        self.layers = [
            _block(context, settings, f"{_BLOCK}.{index}") for index in range(max(self.read) + 1)
        ]

    @property
    def num_squares(self) -> int:
        """Vectors of a crop."""
        rows, columns = self.grid
        return -(-rows // _POOLED) * -(-columns // _POOLED)

    def __call__(self, crops: Tensor) -> Tensor:
        """crops [C, N, patch * patch * 3] -> [C, N, 2 D]: the states of two layers, side by side."""
        count, number, _ = crops.shape
        x = self.patches(crops.to(self.dtype).flatten(0, 1)).view(count, number, -1)
        x = torch.cat((self.first.vector.expand(count, 1, -1), x), dim=1) + self.positions.vector
        x = self.first_norm(x.flatten(0, 1))
        segments, residual = Segments.of([number + 1] * count, x.device), None
        found = {}
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, segments)
            if index in self.read:
                found[index] = self.ops.add(x, residual).view(count, number + 1, -1)[:, 1:]
        return torch.cat([found[index] for index in self.read], dim=-1)

    def squares(self, states: Tensor) -> Tensor:
        """states [C, N, S] -> [squares of all crops, patches of a square, S]; beyond an edge are zeros."""
        rows, columns = self.grid
        x = states.view(len(states), rows, columns, -1)
        x = functional.pad(x, (0, 0, 0, columns % _POOLED, 0, rows % _POOLED))
        count, height, width, size = x.shape
        cut = x.reshape(count, height // _POOLED, _POOLED, width // _POOLED, _POOLED, size)
        return cut.transpose(2, 3).reshape(-1, _POOLED**2, size)


class _Pool(Layer):
    """A square's mean looks at its patches.

    Args:
        before, after: sizes of a patch's states, and of the vector.
    """

    def __init__(self, context: BuildContext, before: int, after: int, num_heads: int) -> None:
        self.num_heads = num_heads
        self.q, self.k, self.v = (
            Linear(context, f"{_POOL}.w{part}", before, [Part(after)], bias=True) for part in "qkv"
        )
        self.o = Linear(context, f"{_POOL}.wo", after, [Part(after)], bias=True)

    def __call__(self, squares: Tensor) -> Tensor:
        """squares [Q, patches, S] -> [Q, D]."""
        count = len(squares)
        flat = squares.flatten(0, 1)
        found = (self.q(squares.mean(dim=1)), self.k(flat), self.v(flat))
        size = found[0].shape[-1] // self.num_heads
        q, k, v = (x.view(count, -1, self.num_heads, size).transpose(1, 2) for x in found)
        seen = functional.scaled_dot_product_attention(q, k, v)
        return self.o(seen.transpose(1, 2).reshape(count, -1))


class _Projector(Layer):
    """``down(silu(gate(x)) * up(x))`` between two sizes.

    Args:
        sizes: of what comes, between the products, and of the result.
    """

    def __init__(self, context: BuildContext, sizes: tuple[int, int, int]) -> None:
        before, between, after = sizes
        names = (f"{_PROJECTOR}.w1", f"{_PROJECTOR}.w3")
        self.gate_up = column_parallel(
            context, f"{_PROJECTOR}.w1_w3", before, (between, between), part_names=names
        )
        self.down = row_parallel(context, f"{_PROJECTOR}.w2", between, after)

    def __call__(self, x: Tensor) -> Tensor:
        """x [Q, sizes[0]] -> [Q, sizes[2]]."""
        return self.down(self.gate_up.gated(x, "silu"))


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    size, eps = settings.integer("image_emb_dim"), settings.number("image_norm_eps")
    between = settings.integer("image_mlp_dim")
    attention = VisionAttention(
        context,
        f"{name}.attention",
        hidden_size=size,
        num_heads=settings.integer("image_num_heads"),
        names=(("wq", "wk", "wv"), "wo"),
    )
    mlp = QuickMLP(context, f"{name}.feed_forward.w1", f"{name}.feed_forward.w2", size, between)
    norms = [LayerNorm(context, f"{name}.{of}_norm", size, eps) for of in ("attention", "ffn")]
    return VisionBlock(norms[0], attention, norms[1], mlp)
