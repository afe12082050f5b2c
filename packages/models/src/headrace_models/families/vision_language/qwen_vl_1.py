"""Qwen-VL: a tower of CLIP's kind whose places are stretched to the image, and queries with places of their
own that look at its states.

Bai et al. 2023, arXiv:2308.12966.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.resampler import Resampler, resampler_rules
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER = "transformer.visual"
_POOL, _LAYER = f"{_TOWER}.attn_pool", f"{_TOWER}.transformer.resblocks"
_VISION: Mapping[str, Any] = {
    "image_size": 448, "patch_size": 14, "width": 1664, "layers": 48, "heads": 16, "mlp_ratio": 4.9231,
    "n_queries": 256,
}  # fmt: skip
"""Values that configs may leave out."""
_PLACES, _EPS = 256, 1e-6
_PARTS = (
    ("ln_1", "attention_norm"), ("attn.out_proj", "attention.out"), ("ln_2", "mlp_norm"),
    ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down"),
)  # fmt: skip


class QwenVL1(MediaDecoder):
    """Every image is as many vectors."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_TOWER}.conv1", "tower.patches"),
        WeightRule(f"{_TOWER}.positional_embedding", "tower.places.vector"),
        WeightRule(f"{_TOWER}.ln_pre", "tower.first_norm"),
        WeightRule(
            f"{_LAYER}.{{}}.attn.in_proj",
            "tower.layers.{}.attention.qkv",
            split=(),
            groups=EACH_KV_HEAD,
        ),
        *(WeightRule(f"{_LAYER}.{{}}.{a}", f"tower.layers.{{}}.{b}") for a, b in _PARTS),
        *resampler_rules(_POOL, "pool"),
        WeightRule(f"{_POOL}.pos_embed", "pool.places.vector"),
        WeightRule(f"{_TOWER}.ln_post", "pool.last_norm"),
        WeightRule(f"{_TOWER}.proj", "pool.projection.vector"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings({**_VISION, **part_of(whole, "visual")})
        size = settings.integer("output_dim", self.hidden_size())
        if size != self.hidden_size():
            raise UnsupportedModel(
                f"config.json: visual.output_dim = {size}: hidden_size is {self.hidden_size()}"
            )
        self.tower = _Tower(context, settings)
        self.pool = _Pool(context, (self.tower.size, size), settings.integer("n_queries"))

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] each.
        """
        states = self.tower(torch.stack([item["pixel_values"] for item in inputs]))
        grids = [(self.tower.side, self.tower.side)] * len(inputs)
        return torch.split(self.pool(states, grids), self.pool.number)


class _Tower(Layer):
    """Images of one size -> the states of their patches, one image behind the other."""

    def __init__(self, context: BuildContext, settings: Settings) -> None:
        self.size, self.patch = settings.integer("width"), settings.integer("patch_size")
        self.side = settings.integer("image_size") // self.patch
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.ops = context.ops
        kernel = (3, self.patch, self.patch)
        self.patches = PatchEmbedding(context, f"{_TOWER}.conv1", kernel, self.size, bias=False)
        self.places = Vector(f"{_TOWER}.positional_embedding", _PLACES, self.size)
        self.first_norm = LayerNorm(context, f"{_TOWER}.ln_pre", self.size, _EPS)
        number = settings.integer("layers", maximum=MAX_LAYERS)
        self.layers = [_block(context, settings, f"{_LAYER}.{index}") for index in range(number)]

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, side, side] -> [I * patches, size]."""
        flat = in_patches(images.to(self.dtype), self.patch)
        count, number, _ = flat.shape
        x = self.patches(flat.flatten(0, 1)).view(count, number, -1)
        x = self.first_norm((x + stretched(self.places.vector, self.side)).flatten(0, 1))
        segments, residual = Segments.of([number] * count, x.device), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        return x if residual is None else self.ops.add(x, residual)


class _Pool(Resampler):
    """The queries stand on a square over the image, as the patches do."""

    def __init__(self, context: BuildContext, sizes: tuple[int, int], number: int) -> None:
        if math.isqrt(number) ** 2 != number:
            raise UnsupportedModel(
                f"config.json: visual.n_queries = {number}: must be rows and as many columns"
            )
        super().__init__(context, _POOL, sizes, number)
        self.places = Vector(f"{_POOL}.pos_embed", number, sizes[1])

    def asked(self) -> Tensor:
        """See :meth:`Resampler.asked`."""
        return super().asked() + self.places.vector

    def placed(self, rows: int, columns: int) -> Tensor:
        """See :meth:`Resampler.placed`; the image is a square."""
        return stretched(self.places.vector, rows)


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    size = settings.integer("width")
    return VisionBlock(
        LayerNorm(context, f"{name}.ln_1", size, _EPS),
        VisionAttention(
            context,
            f"{name}.attn",
            hidden_size=size,
            num_heads=settings.integer("heads"),
            names=(("in_proj",), "out_proj"),
        ),
        LayerNorm(context, f"{name}.ln_2", size, _EPS),
        MLP(
            context,
            f"{name}.mlp.c_fc",
            f"{name}.mlp.c_proj",
            size,
            int(size * settings.positive("mlp_ratio")),
            "gelu",
        ),
    )


def stretched(table: Tensor, side: int) -> Tensor:
    """table [places of a square, size] -> [side * side, size]."""
    own = math.isqrt(len(table))
    if own == side:
        return table
    square = table.float().view(1, own, own, -1).permute(0, 3, 1, 2)
    found = functional.interpolate(square, (side, side), mode="bicubic", align_corners=False)
    return found.flatten(2)[0].T.to(table.dtype)
