"""The tower of Llama 4: patches of tiles, a vector of its own behind them, learned positions and rotation in
two dimensions, an adapter that makes one vector of each square of patches.

Meta 2025, "The Llama 4 herd".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.axes import axial_theta, frequencies, places, rotary_rows
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-5
"""Of all norms; the config's value is not read."""
_ACTIVATION = "gelu"
_NAMES = (("q_proj", "k_proj", "v_proj"), "o_proj")
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 448, "patch_size": 14, "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}  # fmt: skip
"""Values that configs may leave out."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Llama4Tower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.model.layers.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.patch_embedding.linear", f"{target}.patches"),
        WeightRule(f"{source}.class_embedding", f"{target}.last.vector"),
        WeightRule(f"{source}.positional_embedding_vlm", f"{target}.positions.vector"),
        WeightRule(f"{source}.layernorm_pre", f"{target}.first_norm"),
        WeightRule(f"{source}.layernorm_post", f"{target}.last_norm"),
        WeightRule(f"{block}.input_layernorm", f"{own}.attention_norm"),
        WeightRule(f"{block}.self_attn.q_proj", f"{own}.attention.qkv", part=0),
        WeightRule(f"{block}.self_attn.k_proj", f"{own}.attention.qkv", part=1),
        WeightRule(f"{block}.self_attn.v_proj", f"{own}.attention.qkv", part=2),
        WeightRule(f"{block}.self_attn.o_proj", f"{own}.attention.out"),
        WeightRule(f"{block}.post_attention_layernorm", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
        WeightRule(f"{source}.vision_adapter.mlp.fc1", f"{target}.adapter.up"),
        WeightRule(f"{source}.vision_adapter.mlp.fc2", f"{target}.adapter.down"),
    )


class Llama4Tower(Layer):
    """Tiles of one size -> a vector for each square of their patches.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        settings.refuse("hidden_act", "gelu")
        hidden, self.patch = settings.integer("hidden_size"), settings.integer("patch_size")
        self.side = settings.integer("image_size") // self.patch
        self.merge = _merge(settings, self.side)
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        numbers = settings.integer("num_channels") * self.patch**2
        self.patches = PatchEmbedding(
            context, f"{name}.patch_embedding.linear", (numbers,), hidden, bias=False
        )
        self.last = Vector(f"{name}.class_embedding", hidden)
        self.positions = Vector(f"{name}.positional_embedding_vlm", self.side**2 + 1, hidden)
        self.first_norm = LayerNorm(context, f"{name}.layernorm_pre", hidden, _EPS)
        self.layers = [
            _block(context, settings, f"{name}.model.layers.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.last_norm = LayerNorm(context, f"{name}.layernorm_post", hidden, _EPS)
        self.adapter = _adapter(context, settings, name, hidden * self.merge**2)
        self.size = settings.integer("projector_output_dim")
        head_dim = hidden // settings.integer("num_attention_heads")
        self.rotary = _rotary(self.side, head_dim, axial_theta(stated)).to(context.device)

    def __call__(self, tiles: Tensor) -> Tensor:
        """tiles [I, 3, height, width] -> [I, squares, projector_output_dim]."""
        count, states = tiles.shape[0], self.side**2 + 1
        flat = in_patches(tiles.to(self.dtype), self.patch)
        x = self.patches(flat.flatten(0, 1)).view(count, self.side**2, -1)
        x = torch.cat((x, self.last.vector.expand(count, 1, -1)), dim=1) + self.positions.vector
        x, residual = self.first_norm(x.flatten(0, 1)), None
        segments = Segments.of([states] * count, x.device)
        rotary = self.rotary.repeat(count, 1)
        for layer in self.layers:
            x, residual = layer(x, residual, segments, rotary)
        x, _ = self.last_norm.add(x, residual)
        squares = joined(x.view(count, states, -1)[:, :-1], self.side, self.merge)
        vectors = self.adapter(squares.flatten(0, 1))
        return self.ops.activation(vectors, _ACTIVATION).view(*squares.shape[:2], -1)


def _merge(settings: Settings, side: int) -> int:
    """Patches of a side of the square that becomes a vector.

    Raises: UnsupportedModel: a tile is not so many whole squares.
    """
    ratio = settings.positive("pixel_shuffle_ratio", 0.5)
    merge = round(1 / ratio)
    if merge * ratio != 1 or side % merge:
        raise UnsupportedModel(
            f"config.json: vision_config.pixel_shuffle_ratio = {ratio}: {side} rows of patches are not so "
            "many whole vectors"
        )
    return merge


def _adapter(context: BuildContext, settings: Settings, name: str, unit: int) -> Projector:
    """Two products with an activation between; the one behind them is the tower's.

    Raises: UnsupportedModel: sizes do not fit each other.
    """
    between, out = (settings.integer(f"projector_{end}_dim") for end in ("input", "output"))
    if settings.integer("intermediate_size") != unit or between != out:
        raise UnsupportedModel(
            f"config.json: vision_config: intermediate_size = {settings.integer('intermediate_size')}: must "
            f"be {unit}, a square's patches together; and projector_input_dim = {between} must be "
            f"projector_output_dim = {out}"
        )
    inner = f"{name}.vision_adapter.mlp"
    sizes = (unit, between, out)
    return Projector(context, f"{inner}.fc1", f"{inner}.fc2", sizes, _ACTIVATION, bias=False)


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    hidden = settings.integer("hidden_size")
    return VisionBlock(
        LayerNorm(context, f"{name}.input_layernorm", hidden, _EPS),
        VisionAttention(
            context,
            f"{name}.self_attn",
            hidden_size=hidden,
            num_heads=settings.integer("num_attention_heads"),
            names=_NAMES,
            interleaved=True,
        ),
        LayerNorm(context, f"{name}.post_attention_layernorm", hidden, _EPS),
        MLP(
            context,
            f"{name}.mlp.fc1",
            f"{name}.mlp.fc2",
            hidden,
            settings.integer("intermediate_size"),
            _ACTIVATION,
            bias=True,
        ),
    )


def _rotary(side: int, head_dim: int, theta: float) -> Tensor:
    """[side * side + 1, D]: a row for each patch, counted from 1, columns before rows; the vector behind them
    does not turn.

    Raises: UnsupportedModel: heads are too narrow for two axes.
    """
    if head_dim % 4:
        raise UnsupportedModel(
            f"config.json: vision_config: heads of {head_dim} numbers do not turn by two axes"
        )
    each = frequencies(theta, head_dim // 2, 0, 2)
    counted = places(side, side).flip(-1) + 1
    return rotary_rows(torch.cat((counted, torch.zeros(1, 2))), each, each)
