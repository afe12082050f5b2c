"""The tower of RADIO: a ViT that was taught by several others, with a vector of its own for each and further
ones, and a table of places that is resized to the image.

Ranzinger et al. 2023, arXiv:2312.06709; Heinrich et al. 2024, arXiv:2412.07679.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.mlp import vision_mlp
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6
_SIZES: Mapping[str, tuple[int, int, int]] = {
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}
"""``args.model`` of a config -> hidden size, layers, heads."""


def radio_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`RadioTower`: its names in the checkpoint and in the model."""
    inner, block = f"{source}.model.patch_generator", f"{source}.model.blocks.{{}}"
    own = f"{target}.layers.{{}}"
    return (
        WeightRule(f"{inner}.embedder", f"{target}.patches"),
        WeightRule(f"{inner}.pos_embed", f"{target}.positions.vector"),
        WeightRule(f"{inner}.cls_token.token", f"{target}.first.vector"),
        WeightRule(f"{block}.norm1", f"{own}.attention_norm"),
        WeightRule(f"{block}.attn.qkv", f"{own}.attention.qkv", split=()),
        WeightRule(f"{block}.attn.proj", f"{own}.attention.out"),
        WeightRule(f"{block}.norm2", f"{own}.mlp_norm"),
        WeightRule(f"{block}.mlp.fc1", f"{own}.mlp.up"),
        WeightRule(f"{block}.mlp.fc2", f"{own}.mlp.down"),
    )


def conditioner_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """The same, of what a tower normalises images by."""
    return (
        WeightRule(f"{source}.input_conditioner.norm_mean", f"{target}.mean.vector"),
        WeightRule(f"{source}.input_conditioner.norm_std", f"{target}.std.vector"),
    )


class RadioTower(Layer):
    """Images, in numbers from 0 to 1, -> the states of their patches.

    Args:
        stated: the tower's part of the config, with ``args`` in it.
        name: as the checkpoint spells it.
        normalises: False: images come in the numbers that the first product takes.
    """

    def __init__(
        self,
        context: BuildContext,
        stated: Mapping[str, Any],
        name: str,
        *,
        normalises: bool = True,
    ) -> None:
        args = part_of(stated, "args")
        settings = Settings({**_sizes(args), "hidden_act": "gelu", **stated})
        Settings(args).refuse("model_norm", False)
        settings.refuse("feature_normalizer_config")
        self.size, self.patch = settings.integer("hidden_size"), settings.integer("patch_size", 16)
        self.side = Settings(args).integer("cpe_max_size", 2048) // self.patch
        self.number = _first_vectors(args)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.ops = context.ops
        inner = f"{name}.model.patch_generator"
        kernel = (3 * self.patch**2,)
        self.normalises = normalises
        if normalises:
            self.mean = Vector(f"{name}.input_conditioner.norm_mean", 3, 1, 1)
            self.std = Vector(f"{name}.input_conditioner.norm_std", 3, 1, 1)
        self.patches = PatchEmbedding(context, f"{inner}.embedder", kernel, self.size, bias=False)
        self.positions = Vector(f"{inner}.pos_embed", 1, self.side**2, self.size)
        self.first = Vector(f"{inner}.cls_token.token", self.number, self.size)
        self.layers = [
            _block(context, settings, f"{name}.model.blocks.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, height, width], as high as wide -> [I, patches, H]."""
        count, side = len(images), images.shape[-1] // self.patch
        pixels = images.float()
        if self.normalises:
            pixels = (pixels - self.mean.vector) / self.std.vector
        flat = in_patches(pixels.to(self.dtype), self.patch)
        x = self.patches(flat.flatten(0, 1)).view(*flat.shape[:2], -1) + self._placed(side)
        x = torch.cat((self.first.vector.expand(count, -1, -1), x), dim=1)
        number, segments = x.shape[1], Segments.of([x.shape[1]] * count, x.device)
        x, residual = x.flatten(0, 1), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        if residual is not None:
            x = self.ops.add(x, residual)
        return x.view(count, number, -1)[:, self.number :]

    def _placed(self, side: int) -> Tensor:
        """[side * side, H]: the table of places, interpolated."""
        table = self.positions.vector.view(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        found = torch.nn.functional.interpolate(table.float(), (side, side), mode="bilinear")
        return found[0].flatten(1).T.to(self.dtype)


def _sizes(args: Mapping[str, Any]) -> Mapping[str, int]:
    """Sizes by the name of the ViT; {}: the name is unknown, and the config must have them."""
    known = _SIZES.get(str(args.get("model")))
    if known is None:
        return {}
    hidden, layers, heads = known
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }  # fmt: skip


def _first_vectors(args: Mapping[str, Any]) -> int:
    """Vectors in front of the patches: one for each teacher, or one, and as many more as make a multiple.

    Raises: UnsupportedModel: the teachers are no list.
    """
    settings, number = Settings(args), 1
    if settings.flag("cls_token_per_teacher", False):
        teachers = args.get("teachers")
        if not isinstance(teachers, list) or not all(isinstance(x, Mapping) for x in teachers):
            raise UnsupportedModel(
                f"config.json: vision_config.args.teachers = {teachers!r:.100}: must be a list of objects"
            )
        number = len({str(teacher.get("name")) for teacher in teachers})
    if args.get("cpe_num_registers"):
        return number + settings.integer("cpe_num_registers")
    if args.get("register_multiple"):
        multiple = settings.integer("register_multiple")
        return number + multiple - number % multiple
    return number


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    hidden = settings.integer("hidden_size")
    attention = VisionAttention(
        context,
        f"{name}.attn",
        hidden_size=hidden,
        num_heads=settings.integer("num_attention_heads"),
        names=(("qkv",), "proj"),
    )
    sizes = hidden, settings.integer("intermediate_size")
    mlp = vision_mlp(context, settings, f"{name}.mlp.fc1", f"{name}.mlp.fc2", sizes)
    norms = [LayerNorm(context, f"{name}.norm{which}", hidden, _EPS) for which in (1, 2)]
    return VisionBlock(norms[0], attention, norms[1], mlp)
