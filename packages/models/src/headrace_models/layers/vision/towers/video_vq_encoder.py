"""The encoder of Emu3's tokenizer: an image is a still film of a few frames, whose frames become one, and
each place of that a number of a code book.

Wang et al. 2024, arXiv:2409.18869; Gafni et al. 2022, arXiv:2203.13131. Letters: C channels, T frames, S
side of what a layer sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer, Part, Slot, WeightLayer
from headrace_models.layers.linear import Linear
from headrace_models.layers.vision.towers.clip import Vector
from headrace_models.layers.vision.towers.vq_encoder import (
    Conv,
    GroupNorm,
    ResidualBlock,
    block_rules,
    channel_multiples,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_GROUPS, _EPS = 32, 1e-5
_DEFAULTS: Mapping[str, Any] = {
    "codebook_size": 32768, "embed_dim": 4, "latent_channels": 4, "double_latent": False,
    "in_channels": 3, "temporal_downsample_factor": 4, "base_channels": 256,
    "channel_multiplier": [1, 2, 2, 4], "num_res_blocks": 2, "attn_resolutions": [3],
    "hidden_size": 1024, "num_attention_heads": 1,
}  # fmt: skip
"""Values that configs may leave out."""
_MOST_FRAMES = 64


def video_encoder_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`VideoVQEncoder`: its names in the checkpoint and in the model."""
    encoder = f"{source}.encoder"
    level, own = f"{encoder}.down_block.down.{{}}", f"{target}.levels.{{}}"
    middle, still = f"{encoder}.middle_block", f"{encoder}.time_res_stack.{{}}"
    return (
        WeightRule(f"{encoder}.conv_in", f"{target}.first"),
        *block_rules(f"{level}.block.{{}}", f"{own}.blocks.{{}}"),
        *_attention_rules(f"{level}.attn.{{}}", f"{own}.attentions.{{}}"),
        WeightRule(f"{level}.attn_norms.{{}}", f"{own}.attentions.{{}}.norm"),
        WeightRule(f"{level}.downsample.conv", f"{own}.half"),
        *block_rules(f"{middle}.block_1", f"{target}.before"),
        *_attention_rules(f"{middle}.attn_1", f"{target}.middle"),
        WeightRule(f"{middle}.attn_norm", f"{target}.middle.norm"),
        *block_rules(f"{middle}.block_2", f"{target}.behind"),
        WeightRule(f"{encoder}.norm_out", f"{target}.last_norm"),
        WeightRule(f"{encoder}.conv_out", f"{target}.last"),
        WeightRule(f"{encoder}.time_conv.{{}}.conv.conv", f"{target}.joins.{{}}"),
        WeightRule(f"{still}.norm1", f"{target}.films.{{}}.norm_1"),
        WeightRule(f"{still}.conv1.conv", f"{target}.films.{{}}.conv_1"),
        WeightRule(f"{still}.norm2", f"{target}.films.{{}}.norm_2"),
        WeightRule(f"{still}.conv2.conv", f"{target}.films.{{}}.conv_2"),
        WeightRule(f"{source}.quant_conv.conv", f"{target}.to_codes"),
        WeightRule(f"{source}.quantize.embedding.weight", f"{target}.codes.vector"),
    )


def _attention_rules(source: str, target: str) -> list[WeightRule]:
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    return [WeightRule(f"{source}.{own}", f"{target}.{into}") for own, into in names.items()]


class VideoVQEncoder(Layer):
    """An image of any size in whole places -> for each place the number of the nearest code.

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
                f"config.json: vq_config.base_channels = {base}: must be a multiple of {_GROUPS}"
            )
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.place = 2 ** (len(widths) - 1)
        number = settings.integer("num_res_blocks")
        self.first = Conv(f"{inner}.conv_in", settings.integer("in_channels"), base, padding=1)
        at = settings.config["attn_resolutions"] or []
        self.levels = [
            _Level(
                context,
                f"{inner}.down_block.down.{index}",
                ([base, *widths][index], width),
                number,
                settings if index in at else None,
                halves=index < len(widths) - 1,
            )
            for index, width in enumerate(widths)
        ]
        middle, width = f"{inner}.middle_block", widths[-1]
        self.before = ResidualBlock(f"{middle}.block_1", width, width)
        self.middle = _Attention(
            context, settings, f"{middle}.attn_1", f"{middle}.attn_norm", width
        )
        self.behind = ResidualBlock(f"{middle}.block_2", width, width)
        self.last_norm = GroupNorm(f"{inner}.norm_out", width)
        latent = settings.integer("latent_channels")
        inside = latent * (1 + settings.flag("double_latent", False))
        self.last = Conv(f"{inner}.conv_out", width, inside, padding=1)
        self.num_frames = _num_frames(settings)
        self.joins = [
            FilmConv(f"{inner}.time_conv.{index}.conv.conv", inside, inside, (4, 3), halves=True)
            for index in range(self.num_frames.bit_length() - 1)
        ]
        self.films = [_FilmBlock(f"{inner}.time_res_stack.{i}", inside) for i in range(number)]
        size = settings.integer("embed_dim")
        self.to_codes = FilmConv(f"{name}.quant_conv.conv", latent, size, (3, 1))
        self.codes = Vector(
            f"{name}.quantize.embedding.weight", settings.integer("codebook_size"), size
        )

    def __call__(self, image: Tensor) -> Tensor:
        """image [3, height, width] -> [rows, columns] int64."""
        x = self.first(image[None].to(self.dtype))
        for level in self.levels:
            x = level(x)
        x = self.behind(self.middle(self.before(x)))
        x = self.last(functional.silu(self.last_norm(x)))
        # All frames of a still film are one, up to here.
        film = x[:, :, None].expand(-1, -1, self.num_frames, -1, -1)
        for join in self.joins:
            film = functional.silu(join(film))
        for block in self.films:
            film = block(film)
        [states] = self.to_codes(film).unbind(2)
        # In single precision: codes are so many and so near that bfloat16 would pick others.
        flat = states.permute(0, 2, 3, 1).reshape(-1, states.shape[1]).float()
        codes = self.codes.vector.float()
        away = flat.square().sum(1, keepdim=True) + codes.square().sum(1) - 2 * flat @ codes.T
        return away.argmin(dim=1).view(states.shape[2:])


class FilmConv(WeightLayer):
    """A convolution over time and both axes of a frame, [1, C, T, S, S]; two empty frames stand in front of
    the first.

    Args:
        kernel: its length, and its side.
        halves: of two frames, one is left.
    """

    def __init__(
        self, name: str, before: int, after: int, kernel: tuple[int, int], *, halves: bool = False
    ) -> None:
        length, side = kernel
        self.name, self.step = name, (2 if halves else 1, 1, 1)
        self.shape = (after, before, length, side, side)
        self.margin = (*[side // 2] * 4, 2, 0)

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot(self.shape), "bias": Slot(self.shape[:1])}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors["bias"]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.conv3d(functional.pad(x, self.margin), self.weight, self.bias, self.step)


class _FilmNorm(WeightLayer):
    """By the means and variances of each channel that training has seen."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def slots(self) -> Mapping[str, Slot]:
        names = ("weight", "bias", "running_mean", "running_var")
        return {name: Slot((self.size,)) for name in names}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors["bias"]
        self.mean, self.variance = tensors["running_mean"], tensors["running_var"]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.variance, self.weight, self.bias, eps=_EPS)


class _FilmBlock(Layer):
    """``x + conv(swish(norm(conv(swish(norm(x))))))`` of a film."""

    def __init__(self, name: str, size: int) -> None:
        self.norm_1 = _FilmNorm(f"{name}.norm1", size)
        self.conv_1 = FilmConv(f"{name}.conv1.conv", size, size, (3, 3))
        self.norm_2 = _FilmNorm(f"{name}.norm2", size)
        self.conv_2 = FilmConv(f"{name}.conv2.conv", size, size, (3, 3))

    def __call__(self, x: Tensor) -> Tensor:
        made = self.conv_1(functional.silu(self.norm_1(x)))
        return x + self.conv_2(functional.silu(self.norm_2(made)))


class _Attention(Layer):
    """``x + out(attention(norm(x)))`` among all places of an image.

    Args:
        norm: its name in the checkpoint.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, norm: str, size: int
    ) -> None:
        stated, self.num_heads = (
            settings.integer(key) for key in ("hidden_size", "num_attention_heads")
        )
        if stated != size or size % self.num_heads:
            raise UnsupportedModel(
                f"config.json: vq_config.hidden_size = {stated}: must be {size}, the channels where it "
                f"attends, in num_attention_heads = {self.num_heads} parts"
            )
        self.norm = GroupNorm(norm, size)
        self.query, self.key, self.value, self.out = (
            Linear(context, f"{name}.{part}_proj", size, [Part(size)], bias=True)
            for part in ("q", "k", "v", "out")
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[1, C, S, S] -> the same shape."""
        normed = self.norm(x).flatten(2)[0].T.contiguous()
        q, k, v = (
            part(normed).view(len(normed), self.num_heads, -1).transpose(0, 1)
            for part in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        return x + self.out(seen.contiguous()).T.reshape(x.shape)


class _Level(Layer):
    """Blocks at one resolution, and a step to half of it.

    Args:
        sizes: channels before and behind.
        attends: the tower's settings where each block is followed by attention; None: it is not.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: tuple[int, int],
        number: int,
        attends: Settings | None,
        *,
        halves: bool,
    ) -> None:
        before, after = sizes
        self.blocks = [
            ResidualBlock(f"{name}.block.{index}", before if not index else after, after)
            for index in range(number)
        ]
        self.attentions = [
            _Attention(context, attends, f"{name}.attn.{i}", f"{name}.attn_norms.{i}", after)
            for i in range(number)
            if attends is not None
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


def _num_frames(settings: Settings) -> int:
    """Frames that an image stands for: a power of two."""
    number = settings.integer("temporal_downsample_factor", maximum=_MOST_FRAMES)
    if number & (number - 1):
        raise UnsupportedModel(
            f"config.json: vq_config.temporal_downsample_factor = {number}: must be a power of two"
        )
    return number
