"""Molmo 2: overlapping crops of images, and frames, through SigLIP's tower; attention makes a vector of the
patches of a square.

Ai2 2025, Molmo 2. Letters: C crops, N patches of a crop, D size of the tower's states, V vectors, P patches
of a square.
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
from headrace_models.layers.vision.media_decoder import TABLE_IN_VECTORS, part_of
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding
from headrace_models.layers.vision.sees_ahead import SeesAhead
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
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 25, "num_attention_heads": 16,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "image_size": [378, 378], "patch_size": 14,
}  # fmt: skip
_ADAPTER: Mapping[str, Any] = {
    "hidden_size": 1152, "num_attention_heads": 16, "hidden_act": "silu", "intermediate_size": 18_944,
    "vision_feature_layer": [24, 18],
}  # fmt: skip
_SPELLED = {
    "image_size": "image_default_input_size", "patch_size": "image_patch_size",
    "vision_feature_layer": "vit_layers",
}  # fmt: skip
"""Keys of transformers -> those of the published configs."""


def _block_rules() -> tuple[WeightRule, ...]:
    source, target = f"{_BLOCK}.{{}}", "tower.layers.{}"
    parts = [(f"attention.w{part}", "attention.qkv", i) for i, part in enumerate("qkv")]
    others = [
        ("attention_norm", "attention_norm"), ("attention.wo", "attention.out"), ("ffn_norm", "mlp_norm"),
        ("feed_forward.w1", "mlp.up"), ("feed_forward.w2", "mlp.down"),
    ]  # fmt: skip
    every = [*parts, *[(own, into, 0) for own, into in others]]
    return tuple(WeightRule(f"{source}.{own}", f"{target}.{into}", i) for own, into, i in every)


class Molmo2(SeesAhead):
    """Tokens of all images of a prompt, or of all frames of a video, see each other across the text between
    them. A vector is added to that of its token."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_TOWER}.positional_embedding", "tower.positions.vector"),
        WeightRule(f"{_TOWER}.patch_embedding", "tower.patches"),
        *_block_rules(),
        *(WeightRule(f"{_POOL}.w{part}", f"pool.{part}") for part in "qkvo"),
        WeightRule(f"{_PROJECTOR}.w1", "projector.gate_up", part=0),
        WeightRule(f"{_PROJECTOR}.w3", "projector.gate_up", part=1),
        WeightRule(f"{_PROJECTOR}.w2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.embed.no_adapters = TABLE_IN_VECTORS
        vision = _stated(whole, "vit_config" if whole.get("vit_config") else "vision_config")
        adapter = _stated(whole, "adapter_config")
        adapter.refuse("pooling_attention_mask", True)
        adapter.refuse("mlp_bias", False)
        self.tower = _Tower(context, vision, _layers(adapter, vision))
        self.pool = _Pool(context, adapter, len(self.tower.read) * self.tower.size)
        self.projector = _Projector(context, adapter, self.hidden_size())

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
            inputs: ``pixel_values`` [C, N, patch * patch * 3] each, of videos ``pixel_values_videos``;
                ``squares`` [V, P] int64: places of a square's patches among the item's, -1: it has none
                there; ``patch_token`` [1], to whose vector a square's is added.
        """
        key = "pixel_values" if modality == "image" else "pixel_values_videos"
        states = self.tower(torch.cat([own[key] for own in inputs])).flatten(0, 1)
        found, first = [], 0
        for own in inputs:
            crops, patches, _ = own[key].shape
            mine = states[first : first + crops * patches]
            vectors = self.projector(self.pool(mine, own["squares"]))
            found.append(vectors + self.embed(own["patch_token"]))
            first += crops * patches
        return found


class _Tower(Layer):
    """SigLIP's, without its last norm.

    Args:
        read: blocks whose states are taken, in this order.
    """

    def __init__(self, context: BuildContext, settings: Settings, read: Sequence[int]) -> None:
        self.read = read
        self.size, patch = settings.integer("hidden_size"), settings.integer("patch_size")
        height, width = settings.integers("image_size", 2)
        self.num_layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        name = f"{_TOWER}.patch_embedding"
        self.patches = PatchEmbedding(context, name, (patch**2 * 3,), self.size, bias=True)
        number = (height // patch) * (width // patch)
        self.positions = Vector(f"{_TOWER}.positional_embedding", number, self.size)
        self.layers = [
            _block(context, settings, f"{_BLOCK}.{index}") for index in range(max(read) + 1)
        ]

    def __call__(self, crops: Tensor) -> Tensor:
        """crops [C, N, patch * patch * 3] -> [C, N, len(read) * D]."""
        count, number, _ = crops.shape
        x = self.patches(crops.to(self.dtype).flatten(0, 1)).view(count, number, -1)
        x = (x + self.positions.vector).flatten(0, 1)
        segments, residual = Segments.of([number] * count, x.device), None
        found = {}
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, segments)
            if index in self.read:
                found[index] = self.ops.add(x, residual)
        return torch.cat([found[index] for index in self.read], dim=-1).view(count, number, -1)


class _Pool(Layer):
    """A square's mean looks at its patches.

    Args:
        before: size of a patch's states.
    """

    def __init__(self, context: BuildContext, settings: Settings, before: int) -> None:
        after, self.num_heads = _heads(settings)
        self.q, self.k, self.v = (
            Linear(context, f"{_POOL}.w{part}", before, [Part(after)], bias=True) for part in "qkv"
        )
        self.o = Linear(context, f"{_POOL}.wo", after, [Part(after)], bias=True)

    def __call__(self, states: Tensor, squares: Tensor) -> Tensor:
        """states [patches, S] of an item, squares [V, P] -> [V, D]."""
        is_there = squares >= 0
        patches = states[squares.clamp(min=0)] * is_there[..., None].to(states)
        mean = patches.sum(dim=1) / is_there.sum(dim=1, keepdim=True).to(states)
        count, flat = len(squares), patches.flatten(0, 1)
        found = (self.q(mean), self.k(flat), self.v(flat))
        size = found[0].shape[-1] // self.num_heads
        q, k, v = (x.view(count, -1, self.num_heads, size).transpose(1, 2) for x in found)
        mask = is_there[:, None, None]
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(seen.transpose(1, 2).reshape(count, -1))


class _Projector(Layer):
    """``down(act(gate(x)) * up(x))`` between two sizes."""

    def __init__(self, context: BuildContext, settings: Settings, after: int) -> None:
        before, between = settings.integer("hidden_size"), settings.integer("intermediate_size")
        self.activation = settings.activation("hidden_act")
        names = (f"{_PROJECTOR}.w1", f"{_PROJECTOR}.w3")
        self.gate_up = column_parallel(
            context, f"{_PROJECTOR}.w1_w3", before, (between, between), part_names=names
        )
        self.down = row_parallel(context, f"{_PROJECTOR}.w2", between, after)

    def __call__(self, x: Tensor) -> Tensor:
        """x [V, D] -> [V, H]."""
        return self.down(self.gate_up.gated(x, self.activation))


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    size, heads = _heads(settings)
    between, eps = settings.integer("intermediate_size"), settings.number("layer_norm_eps")
    attention = VisionAttention(
        context,
        f"{name}.attention",
        hidden_size=size,
        num_heads=heads,
        names=(("wq", "wk", "wv"), "wo"),
    )
    up, down = f"{name}.feed_forward.w1", f"{name}.feed_forward.w2"
    mlp = vision_mlp(context, settings, up, down, (size, between))
    norms = [LayerNorm(context, f"{name}.{of}_norm", size, eps) for of in ("attention", "ffn")]
    return VisionBlock(norms[0], attention, norms[1], mlp)


def _heads(settings: Settings) -> tuple[int, int]:
    """Size and heads of attention in which all is as wide as its output."""
    size, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    settings.refuse("num_key_value_heads", heads)
    settings.refuse("head_dim", size // heads)
    settings.refuse("attention_bias", True)
    return size, heads


def _stated(whole: Mapping[str, Any], key: str) -> Settings:
    """A part of a config, in transformers' spelling, with the defaults of its class."""
    stated = dict(part_of(whole, key))
    for own, published in _SPELLED.items():
        if published in stated:
            stated[own] = stated[published]
    return Settings({**(_ADAPTER if key == "adapter_config" else _VISION), **stated})


def _layers(adapter: Settings, vision: Settings) -> Sequence[int]:
    """Blocks whose states are taken: negative numbers count from the last.

    Raises: UnsupportedModel: there are no such.
    """
    count = vision.integer("num_hidden_layers", maximum=MAX_LAYERS)
    stated = adapter.config["vision_feature_layer"]
    good = isinstance(stated, list) and len(stated) > 0
    if not good or not all(type(layer) is int and -count <= layer < count for layer in stated):
        raise UnsupportedModel(
            f"config.json: vit_layers = {stated!r:.200}: must be numbers of the tower's {count} layers"
        )
    return [layer % count for layer in stated]
