"""The tower of InternVL, as transformers has it and as it was published: patches of tiles, learned
positions, pre-norm blocks whose results are scaled.

Chen et al. 2023, arXiv:2312.14238 (InternViT); Zhu et al. 2025, arXiv:2504.10479 (InternVL3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.attention.heads_norm import WholeRMSNorm
from headrace_models.layers.base import Layer
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_HEAD_EPS = 1e-6
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "image_size": 448, "patch_size": 14, "hidden_act": "gelu",
}  # fmt: skip
"""Values that configs may leave out."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of a tower's tensors, and what else depends on who wrote the checkpoint. Plain data."""

    first: str
    positions: str
    patches: str
    """Below ``embeddings``: of the vector in front, the positions, and the kernel."""
    blocks: str
    """Of the list of blocks."""
    norms: tuple[str, str]
    """Below a block: of the norms of attention and MLP."""
    attention: str
    projections: tuple[tuple[str, ...], str]
    """Below ``attention``: of query, key and value, or of the one tensor of the three; of the output."""
    scales: tuple[str, str]
    """Below a block: of what scales the results of attention and MLP."""
    has_head_eps: bool
    """The norms of queries and keys have an epsilon of their own, whatever the config says."""
    key_of_layer: str
    """In the config: of the layer that is read."""


BY_TRANSFORMERS = Layout(
    "cls_token",
    "position_embeddings",
    "patch_embeddings.projection",
    "encoder.layer",
    ("layernorm_before", "layernorm_after"),
    "attention",
    (("q_proj", "k_proj", "v_proj"), "projection_layer"),
    ("lambda_1", "lambda_2"),
    has_head_eps=True,
    key_of_layer="vision_feature_layer",
)
PUBLISHED = Layout(
    "class_embedding",
    "position_embedding",
    "patch_embedding",
    "encoder.layers",
    ("norm1", "norm2"),
    "attn",
    (("qkv",), "proj"),
    ("ls1", "ls2"),
    has_head_eps=False,
    key_of_layer="select_layer",
)


def tower_rules(
    source: str, target: str, layout: Layout = BY_TRANSFORMERS
) -> tuple[WeightRule, ...]:
    """Rules of an :class:`InternVLTower`: its names in the checkpoint and in the model."""
    block, own = f"{source}.{layout.blocks}.{{}}", f"{target}.layers.{{}}"
    inner, (parts, out) = f"{block}.{layout.attention}", layout.projections
    joined = f"{own}.attention.qkv"
    return (
        WeightRule(f"{source}.embeddings.{layout.first}", f"{target}.first.vector"),
        WeightRule(f"{source}.embeddings.{layout.patches}", f"{target}.patches"),
        WeightRule(f"{source}.embeddings.{layout.positions}", f"{target}.positions.vector"),
        WeightRule(f"{source}.layernorm", f"{target}.last_norm"),
        WeightRule(f"{block}.{layout.norms[0]}", f"{own}.attention_norm"),
        *(
            [WeightRule(f"{inner}.{parts[0]}", joined, split=())]
            if len(parts) == 1
            else [WeightRule(f"{inner}.{part}", joined, part=i) for i, part in enumerate(parts)]
        ),
        WeightRule(f"{inner}.q_norm", f"{own}.attention.query_norm"),
        WeightRule(f"{inner}.k_norm", f"{own}.attention.key_norm"),
        WeightRule(f"{inner}.{out}", f"{own}.attention.out"),
        WeightRule(f"{block}.{layout.scales[0]}", f"{own}.attention_scale.vector"),
        WeightRule(f"{block}.{layout.norms[1]}", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
        WeightRule(f"{block}.{layout.scales[1]}", f"{own}.mlp_scale.vector"),
    )


class ScaledBlock(VisionBlock):
    """Norm, attention, scale, residual; norm, MLP, scale, residual (Touvron et al. 2021,
    arXiv:2103.17239).

    Args:
        name: as the checkpoint spells it.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, layout: Layout
    ) -> None:
        hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        eps, inner = settings.number("layer_norm_eps", 1e-6), f"{name}.{layout.attention}"
        head_eps = _HEAD_EPS if layout.has_head_eps else eps
        kind = settings.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm")
        norm = LayerNorm if kind == "layer_norm" else RMSNorm
        norms = [
            WholeRMSNorm(context, f"{inner}.{which}_norm", heads, hidden // heads, head_eps)
            for which in ("q", "k")
            if settings.flag("use_qk_norm", False)
        ]
        attention = VisionAttention(
            context,
            inner,
            hidden_size=hidden,
            num_heads=heads,
            bias=settings.flag("attention_bias", False),
            out_bias=True,
            names=layout.projections,
            head_norms=(norms[0], norms[1]) if norms else None,
        )
        sizes = (hidden, settings.integer("intermediate_size"))
        mlp = vision_mlp(context, settings, f"{name}.mlp.fc1", f"{name}.mlp.fc2", sizes)
        super().__init__(
            norm(context, f"{name}.{layout.norms[0]}", hidden, eps),
            attention,
            norm(context, f"{name}.{layout.norms[1]}", hidden, eps),
            mlp,
        )
        self.attention_scale = Vector(f"{name}.{layout.scales[0]}", hidden)
        self.mlp_scale = Vector(f"{name}.{layout.scales[1]}", hidden)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        segments: Segments,
        rotary: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`VisionBlock`."""
        x, stream = self.attention_norm.add(x, residual)
        x = self.attention(x, segments, rotary) * self.attention_scale.vector
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x) * self.mlp_scale.vector, stream


class InternVLTower(Layer):
    """Tiles of one size -> the states of their patches.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
        last: the layer whose output is wanted, counted as transformers counts hidden states: 0 is the
            blocks' input, -1 the last block's output.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        *,
        last: int = -1,
        layout: Layout = BY_TRANSFORMERS,
    ) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        settings.refuse("use_absolute_position_embeddings", True)
        self.name, self.ops, self.layout = name, context.ops, layout
        self.size, self.patch = settings.integer("hidden_size"), _side(settings, "patch_size")
        self.side = _side(settings, "image_size") // self.patch
        self.num_layers = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        wanted = last if last >= 0 else self.num_layers + 1 + last
        if not 0 <= wanted <= self.num_layers:
            raise UnsupportedModel(
                f"config.json: {layout.key_of_layer} = {last}: the tower has {self.num_layers} layers"
            )
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        inner, hidden = f"{name}.embeddings", self.size
        kernel = (settings.integer("num_channels"), self.patch, self.patch)
        self.patches = PatchEmbedding(
            context, f"{inner}.{layout.patches}", kernel, hidden, bias=True
        )
        self.first = Vector(f"{inner}.{layout.first}", 1, 1, hidden)
        self.positions = Vector(f"{inner}.{layout.positions}", 1, self.side**2 + 1, hidden)
        self.layers = [
            ScaledBlock(context, settings, f"{name}.{layout.blocks}.{index}", layout)
            for index in range(wanted)
        ]
        # With mean pooling the norm is the pooler's; and an inner layer's states are not normed.
        self.last_norm: LayerNorm | None = None
        if last == -1 and not settings.flag("use_mean_pooling", True):
            eps = settings.number("layer_norm_eps", 1e-6)
            self.last_norm = LayerNorm(context, f"{name}.layernorm", hidden, eps)

    @property
    def unused(self) -> Mapping[str, str]:
        """Names of tensors that are not read -> why."""
        why = "behind the layer of the tower that is read"
        layers = range(len(self.layers), self.num_layers)
        blocks = re.escape(f"{self.name}.{self.layout.blocks}")
        found = {rf"{blocks}\.{index}\..*": why for index in layers}
        if self.last_norm is None:
            found[rf"{self.name}\.layernorm\..*"] = why
        return {
            **found,
            rf"{self.name}\.embeddings\.mask_token": "training hides patches behind it",
        }

    def __call__(self, tiles: Tensor) -> Tensor:
        """tiles [I, 3, height, width] -> [I, rows, columns, H]."""
        count, states = tiles.shape[0], self.side**2 + 1
        flat = in_patches(tiles.to(self.dtype), self.patch)
        x = self.patches(flat.flatten(0, 1)).view(count, self.side**2, -1)
        x = torch.cat((self.first.vector.expand(count, 1, -1), x), dim=1) + self.positions.vector
        x, residual = x.flatten(0, 1), None
        segments = Segments.of([states] * count, x.device)
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        if self.last_norm is not None:
            x, _ = self.last_norm.add(x, residual)
        elif residual is not None:
            x = self.ops.add(x, residual)
        return x.view(count, states, -1)[:, 1:].view(count, self.side, self.side, -1)


def _side(settings: Settings, key: str) -> int:
    """A size in pixels, which configs write twice or once.

    Raises: UnsupportedModel: height and width differ.
    """
    value = settings.config[key]
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(
                f"config.json: vision_config.{key} = {value!r}: height and width must be the same"
            )
        value = value[0]
    return Settings({key: value}).integer(key)
