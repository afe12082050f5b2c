"""GLM-4V 9B: the tower of CogVLM, squares of whose states become one by a convolution and a gated layer.

Wang et al. 2023, arXiv:2311.03079; GLM Team 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import MROPE_POSITIONS, WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.rotary import ROTARY_ROWS
from headrace_models.layers.vision.blocks import Segments, VisionAttention
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput

_TOWER = "transformer.vision"
_PATCHES, _LAYER, _GLU = (
    f"{_TOWER}.{name}" for name in ("patch_embedding", "transformer.layers", "linear_proj")
)
_VISION: Mapping[str, Any] = {
    "hidden_size": 1792, "intermediate_size": 15360, "num_hidden_layers": 63, "num_heads": 16,
    "image_size": 1120, "patch_size": 14, "num_positions": 6401, "layer_norm_eps": 1e-6,
    "hidden_act": "gelu", "scaling_factor": 8, "in_channels": 3,
}  # fmt: skip
"""Values that configs may leave out."""
_NORM_EPS, _SQUARE = 1e-5, 2
_BETWEEN = 13_696
_JOINED = "attention.query_key_value"
_PARTS = (
    ("input_layernorm", "attention_norm"), (_JOINED, "attention.qkv"),
    ("attention.dense", "attention.out"), ("post_attention_layernorm", "mlp_norm"), ("mlp.fc1", "mlp.up"),
    ("mlp.fc2", "mlp.down"),
)  # fmt: skip


class Glm4V9B(MediaDecoder):
    """An image's vectors, between one that begins it and one that ends it, all stand at one place."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_PATCHES}.proj", "tower.patches"),
        WeightRule(f"{_PATCHES}.cls_embedding", "tower.first.vector"),
        WeightRule(f"{_PATCHES}.position_embedding", "tower.places"),
        *(
            WeightRule(
                f"{_LAYER}.{{}}.{a}", f"tower.layers.{{}}.{b}", split=() if a == _JOINED else None
            )
            for a, b in _PARTS
        ),
        WeightRule(f"{_TOWER}.conv", "squares"),
        WeightRule(f"{_GLU}.linear_proj", "into"),
        WeightRule(f"{_GLU}.norm1", "norm"),
        WeightRule(f"{_GLU}.gate_proj", "glu.gate_up", part=0),
        WeightRule(f"{_GLU}.dense_h_to_4h", "glu.gate_up", part=1),
        WeightRule(f"{_GLU}.dense_4h_to_h", "glu.down"),
        WeightRule(f"{_TOWER}.boi", "begin.vector"),
        WeightRule(f"{_TOWER}.eoi", "end.vector"),
    )

    rotary: Tensor

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings({**_VISION, **part_of(whole, "vision_config")})
        self.tower = _Tower(context, settings)
        size, between = self.hidden_size(), self.settings.integer("intermediate_size", _BETWEEN)
        self.squares = PatchEmbedding(
            context, f"{_TOWER}.conv", (self.tower.size, _SQUARE, _SQUARE), size, bias=True
        )
        self.into = Linear(context, f"{_GLU}.linear_proj", size, [Part(size)])
        self.norm = LayerNorm(context, f"{_GLU}.norm1", size, _NORM_EPS)
        self.glu = GatedMLP(
            context, _GLU, size, between, "silu", fused_name="gate_up",
            part_names=("gate_proj", "dense_h_to_4h"), down_name="dense_4h_to_h",
        )  # fmt: skip
        self.begin, self.end = (Vector(f"{_TOWER}.{name}", 1, 1, size) for name in ("boi", "eoi"))
        self.factor, self.ops = settings.positive("scaling_factor"), context.ops

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] each.
        """
        states = self.tower(torch.stack([item["pixel_values"] for item in inputs]))
        count, number, size = states.shape
        side = self.tower.side
        squares = in_patches(states.mT.reshape(count, size, side, side), _SQUARE)
        x = self.norm(self.into(self.squares(squares.flatten(0, 1))))
        x = self.glu(self.ops.activation(x, "gelu")).view(count, number // _SQUARE**2, -1)
        begin, end = (vector.vector.view(1, -1) for vector in (self.begin, self.end))
        return [torch.cat((begin, own, end)) / self.factor for own in x]

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`: on all axes the same."""
        steps = torch.ones(num_tokens, dtype=torch.int64)
        steps[:1] = 0
        for item in media:  # its first stands at its own place, the next share one
            steps[item.offset + 2 : item.offset + item.num_tokens - 1] = 0
        return steps.cumsum(0).expand(3, num_tokens)

    def prepare_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """See :meth:`headrace_models.layers.decoder.Decoder.prepare_batch`."""
        axes = batch.extra.get(MROPE_POSITIONS)
        if axes is not None:
            batch = replace(batch, extra={**batch.extra, ROTARY_ROWS: self.rotary[axes[0]]})
        return super().prepare_batch(batch)


class _Tower(Layer):
    """Images of one size -> the states of their patches."""

    def __init__(self, context: BuildContext, settings: Settings) -> None:
        self.size, self.patch = settings.integer("hidden_size"), settings.integer("patch_size")
        self.side = settings.integer("image_size") // self.patch
        positions = settings.integer("num_positions")
        if positions != self.side**2 + 1 or self.side % _SQUARE:
            raise UnsupportedModel(
                f"config.json: vision_config.num_positions = {positions}: images of "
                f"{settings.integer('image_size')} in patches of {self.patch} have {self.side**2 + 1}, and "
                "must be of whole squares of them"
            )
        settings.refuse("in_channels", 3)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        kernel = (3, self.patch, self.patch)
        self.patches = PatchEmbedding(context, f"{_PATCHES}.proj", kernel, self.size, bias=True)
        self.first = Vector(f"{_PATCHES}.cls_embedding", 1, self.size)
        self.places = Embedding(context, f"{_PATCHES}.position_embedding", positions, self.size)
        number = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        self.layers = [_Block(context, settings, f"{_LAYER}.{i}") for i in range(number)]

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, side, side] -> [I, patches, size]."""
        flat = in_patches(images.to(self.dtype), self.patch)
        count = len(flat)
        x = self.patches(flat.flatten(0, 1)).view(count, -1, self.size)
        x = torch.cat((self.first.vector.expand(count, 1, -1), x), dim=1) + self.places.weight
        number = x.shape[1]
        segments, x = Segments.of([number] * count, x.device), x.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, segments)
        return x.view(count, number, -1)[:, 1:]


class _Block(Layer):
    """What attention and the feed-forward layer make is normed, and added."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size, eps = settings.integer("hidden_size"), settings.number("layer_norm_eps")
        self.attention = VisionAttention(
            context,
            f"{name}.attention",
            hidden_size=size,
            num_heads=settings.integer("num_heads"),
            names=(("query_key_value",), "dense"),
        )
        sizes = (size, settings.integer("intermediate_size"))
        self.mlp = vision_mlp(context, settings, f"{name}.mlp.fc1", f"{name}.mlp.fc2", sizes)
        self.attention_norm = LayerNorm(context, f"{name}.input_layernorm", size, eps)
        self.mlp_norm = LayerNorm(context, f"{name}.post_attention_layernorm", size, eps)

    def __call__(self, x: Tensor, segments: Segments) -> Tensor:
        """x [T, H] -> the same shape."""
        x = x + self.attention_norm(self.attention(x, segments))
        return x + self.mlp_norm(self.mlp(x))
