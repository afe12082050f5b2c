"""An encoder of convolutions whose results are numbers of a code book: an image becomes tokens.

Gafni et al. 2022, arXiv:2203.13131; Esser et al. 2021, arXiv:2012.09841. Letters: I images, C channels, S
side of what a layer sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_GROUPS, _EPS = 32, 1e-6
_DEFAULTS: Mapping[str, Any] = {
    "embed_dim": 256, "num_embeddings": 8192, "double_latent": False, "latent_channels": 256,
    "resolution": 512, "in_channels": 3, "base_channels": 128, "channel_multiplier": [1, 1, 2, 2, 4],
    "num_res_blocks": 2, "attn_type": "vanilla",
}  # fmt: skip
"""Values that configs may leave out."""


def encoder_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`VQEncoder`: its names in the checkpoint and in the model."""
    encoder = f"{source}.encoder"
    return (
        WeightRule(f"{encoder}.conv_in", f"{target}.first"),
        WeightRule(f"{encoder}.down.{{}}.downsample.conv", f"{target}.levels.{{}}.half"),
        *block_rules(f"{encoder}.down.{{}}.block.{{}}", f"{target}.levels.{{}}.blocks.{{}}"),
        *_attention_rules(
            f"{encoder}.down.{{}}.attn.{{}}", f"{target}.levels.{{}}.attentions.{{}}"
        ),
        *block_rules(f"{encoder}.mid.block_1", f"{target}.before"),
        *_attention_rules(f"{encoder}.mid.attn_1", f"{target}.middle"),
        *block_rules(f"{encoder}.mid.block_2", f"{target}.behind"),
        WeightRule(f"{encoder}.norm_out", f"{target}.last_norm"),
        WeightRule(f"{encoder}.conv_out", f"{target}.last"),
        WeightRule(f"{source}.quant_conv", f"{target}.to_codes"),
        WeightRule(f"{source}.quantize.embedding.weight", f"{target}.codes.vector"),
    )


def block_rules(source: str, target: str) -> list[WeightRule]:
    """Rules of a :class:`ResidualBlock`."""
    names = {"norm1": "norm_1", "conv1": "conv_1", "norm2": "norm_2", "conv2": "conv_2",
             "nin_shortcut": "shortcut"}  # fmt: skip
    return [WeightRule(f"{source}.{own}", f"{target}.{into}") for own, into in names.items()]


def _attention_rules(source: str, target: str) -> list[WeightRule]:
    names = {"norm": "norm", "q": "query", "k": "key", "v": "value", "proj_out": "out"}
    return [WeightRule(f"{source}.{own}", f"{target}.{into}") for own, into in names.items()]


class VQEncoder(Layer):
    """Images of one size -> for each place the number of the nearest code.

    Args:
        stated: the tower's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        base, inner = settings.integer("base_channels"), f"{name}.encoder"
        widths = [base * times for times in channel_multiples(settings)]
        if any(width % _GROUPS for width in (base, *widths)):
            raise UnsupportedModel(
                f"config.json: base_channels = {base}: must be a multiple of {_GROUPS}"
            )
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        attended = settings.config["attn_type"] == "vanilla"
        at = settings.integers("attn_resolutions") if attended else []
        side = settings.integer("resolution")
        self.first = Conv(f"{inner}.conv_in", settings.integer("in_channels"), base, padding=1)
        self.levels = []
        for index, width in enumerate(widths):
            last = index == len(widths) - 1
            sizes = (base if not index else widths[index - 1], width)
            number = settings.integer("num_res_blocks")
            level = f"{inner}.down.{index}"
            self.levels.append(_Level(level, sizes, number, attends=side in at, halves=not last))
            side //= 1 if last else 2
        self.side, width = side, widths[-1]
        self.before = ResidualBlock(f"{inner}.mid.block_1", width, width)
        self.middle = _Attention(f"{inner}.mid.attn_1", width) if attended else None
        self.behind = ResidualBlock(f"{inner}.mid.block_2", width, width)
        self.last_norm = GroupNorm(f"{inner}.norm_out", width)
        latent = settings.integer("latent_channels") * (1 + settings.flag("double_latent", False))
        self.last = Conv(f"{inner}.conv_out", width, latent, padding=1)
        size = settings.integer("embed_dim")
        self.to_codes = Conv(f"{name}.quant_conv", latent, size, kernel=1)
        number = settings.integer("num_embeddings")
        self.codes = Vector(f"{name}.quantize.embedding.weight", number, size)

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, side, side] -> [I, places] int64, row by row."""
        x = self.first(images.to(self.dtype))
        for level in self.levels:
            x = level(x)
        x = self.before(x)
        x = self.behind(x if self.middle is None else self.middle(x))
        x = self.to_codes(self.last(_swish(self.last_norm(x))))
        states = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        codes = self.codes.vector
        away = states.square().sum(1, keepdim=True) + codes.square().sum(1) - 2 * states @ codes.T
        return away.argmin(dim=1).view(len(images), -1)


class Conv(WeightLayer):
    """A convolution with a square kernel."""

    def __init__(
        self,
        name: str,
        before: int,
        after: int,
        *,
        kernel: int = 3,
        padding: int = 0,
        step: int = 1,
    ) -> None:
        self.name, self.padding, self.step = name, padding, step
        self.shape = (after, before, kernel, kernel)

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot(self.shape), "bias": Slot(self.shape[:1])}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors["bias"]

    def __call__(self, x: Tensor) -> Tensor:
        """[I, C, S, S] -> the same with other sizes."""
        return functional.conv2d(x, self.weight, self.bias, self.step, self.padding)


class GroupNorm(WeightLayer):
    """Over groups of channels, all places together."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,)), "bias": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors["bias"]

    def __call__(self, x: Tensor) -> Tensor:
        """x [I, C, S, S] -> the same shape."""
        return functional.group_norm(x, _GROUPS, self.weight, self.bias, _EPS)


class ResidualBlock(Layer):
    """``x + conv(swish(norm(conv(swish(norm(x))))))``."""

    def __init__(self, name: str, before: int, after: int) -> None:
        self.norm_1 = GroupNorm(f"{name}.norm1", before)
        self.conv_1 = Conv(f"{name}.conv1", before, after, padding=1)
        self.norm_2 = GroupNorm(f"{name}.norm2", after)
        self.conv_2 = Conv(f"{name}.conv2", after, after, padding=1)
        self.shortcut: Conv | None = None
        if before != after:
            self.shortcut = Conv(f"{name}.nin_shortcut", before, after, kernel=1)

    def __call__(self, x: Tensor) -> Tensor:
        made = self.conv_1(_swish(self.norm_1(x)))
        made = self.conv_2(_swish(self.norm_2(made)))
        return made + (x if self.shortcut is None else self.shortcut(x))


class _Attention(Layer):
    """``x + out(attention(norm(x)))`` of one head, among all places of an image."""

    def __init__(self, name: str, size: int) -> None:
        self.norm = GroupNorm(f"{name}.norm", size)
        self.query, self.key, self.value = (
            Conv(f"{name}.{part}", size, size, kernel=1) for part in "qkv"
        )
        self.out = Conv(f"{name}.proj_out", size, size, kernel=1)

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            part(normed).flatten(2).transpose(1, 2)[:, None]
            for part in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.out(seen.transpose(1, 2).reshape(x.shape))


class _Level(Layer):
    """Blocks at one resolution, and a step to half of it.

    Args:
        sizes: channels before and behind.
    """

    def __init__(
        self, name: str, sizes: tuple[int, int], number: int, *, attends: bool, halves: bool
    ) -> None:
        before, after = sizes
        self.blocks = [
            ResidualBlock(f"{name}.block.{index}", before if not index else after, after)
            for index in range(number)
        ]
        self.attentions = [
            _Attention(f"{name}.attn.{index}", after) for index in range(number if attends else 0)
        ]
        self.half: Conv | None = None
        if halves:
            self.half = Conv(f"{name}.downsample.conv", after, after, step=2)

    def __call__(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.attentions:
                x = self.attentions[index](x)
        if self.half is None:
            return x
        return self.half(functional.pad(x, (0, 1, 0, 1)))


def channel_multiples(settings: Settings) -> Sequence[int]:
    """Multiples of ``base_channels`` that the resolutions have, ``channel_multiplier``.

    Raises: UnsupportedModel: they are no list of integers from 1.
    """
    found = settings.integers("channel_multiplier")
    if not found or not all(found):
        raise UnsupportedModel(
            f"config.json: channel_multiplier = {found}: must be a list of integers from 1"
        )
    return found


def _swish(x: Tensor) -> Tensor:
    return functional.silu(x)
