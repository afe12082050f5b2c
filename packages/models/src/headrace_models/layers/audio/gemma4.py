"""Gemma 4's audio encoder: Gemma 3n's Conformer, whose products stay within bounds, behind convolutions with
a norm of each place; all states are kept.

Google 2026, Gemma 4; Zhang et al. 2023, arXiv:2303.01037. Letters: F frames, M mel bins, T states, H hidden
size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.audio.usm import NearAttention, sines
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.clipped_linear import ClippedLinear, clipped_rules
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6
_SIDE = 3
_WIDEST = 1 << 12
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "hidden_act": "silu",
    "subsampling_conv_channels": [128, 32], "conv_kernel_size": 5, "residual_weight": 0.5,
    "attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0,
    "attention_logit_cap": 50.0, "use_clipped_linears": True, "rms_norm_eps": 1e-6,
    "gradient_clipping": 1e10, "output_proj_dims": 1536,
}  # fmt: skip
"""Values that configs may leave out."""


def encoder_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Gemma4Encoder`: its names in the checkpoint and in the model."""
    stem, layer = f"{source}.subsample_conv_projection", f"{source}.layers.{{}}"
    own, rules = f"{target}.layers.{{}}", list[WeightRule]()
    for index in range(2):
        rules += [
            WeightRule(f"{stem}.layer{index}.conv.weight", f"{target}.stem.{index}.kernel.vector"),
            WeightRule(f"{stem}.layer{index}.norm.weight", f"{target}.stem.{index}.scale.vector"),
        ]
        half = f"feed_forward{index + 1}", ("first", "second")[index]
        rules += _half_rules(f"{layer}.{half[0]}", f"{own}.{half[1]}")
    attention, convolution = f"{layer}.self_attn", f"{layer}.lconv1d"
    for name, into in (
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        ("post", "out"),
    ):
        rules += clipped_rules(f"{attention}.{name}", f"{own}.attention.{into}")
    rules += clipped_rules(f"{convolution}.linear_start", f"{own}.convolution.up")
    rules += clipped_rules(f"{convolution}.linear_end", f"{own}.convolution.down")
    return (
        *rules,
        WeightRule(f"{stem}.input_proj_linear", f"{target}.joined"),
        WeightRule(f"{attention}.relative_k_proj", f"{own}.attention.distances"),
        WeightRule(f"{attention}.per_dim_scale", f"{own}.attention.scales.vector"),
        WeightRule(f"{layer}.norm_pre_attn", f"{own}.attention.norm"),
        WeightRule(f"{layer}.norm_post_attn", f"{own}.attention.last_norm"),
        WeightRule(f"{convolution}.depthwise_conv1d.weight", f"{own}.convolution.kernel.vector"),
        WeightRule(f"{convolution}.pre_layer_norm", f"{own}.convolution.norm"),
        WeightRule(f"{convolution}.conv_norm", f"{own}.convolution.inner_norm"),
        WeightRule(f"{layer}.norm_out", f"{own}.last_norm"),
        WeightRule(f"{source}.output_proj", f"{target}.out"),
    )


def _half_rules(source: str, target: str) -> list[WeightRule]:
    return [
        *clipped_rules(f"{source}.ffw_layer_1", f"{target}.up"),
        *clipped_rules(f"{source}.ffw_layer_2", f"{target}.down"),
        WeightRule(f"{source}.pre_layer_norm", f"{target}.norm"),
        WeightRule(f"{source}.post_layer_norm", f"{target}.last_norm"),
    ]


class Gemma4Encoder(Layer):
    """Spectrogram frames -> states.

    Args:
        stated: the encoder's part of the config.
        name: as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        settings.choice("hidden_act", ("silu",), "silu")
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        hidden, stem = settings.integer("hidden_size"), f"{name}.subsample_conv_projection"
        self.bins, channels = settings.integers("subsampling_conv_channels", 2)
        eps = settings.number("rms_norm_eps")
        sizes = ((1, self.bins), (self.bins, channels))  # as many channels as pitches come
        self.stem = [
            Halving(f"{stem}.layer{index}", before, after, eps)
            for index, (before, after) in enumerate(sizes)
        ]
        left = self.bins // 4 * channels
        self.joined = Linear(context, f"{stem}.input_proj_linear", left, [Part(hidden)])
        self.layers = [
            Block(context, settings, f"{name}.layers.{index}")
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.size = settings.integer("output_proj_dims")
        self.out = Linear(context, f"{name}.output_proj", hidden, [Part(self.size)], bias=True)

    def __call__(self, frames: Tensor) -> Tensor:
        """frames [F, M] of one recording -> [T, size]; T is F halved twice, rounded up."""
        x = frames.to(self.dtype)[..., None]
        for convolution in self.stem:
            x = convolution(x)
        x = self.joined(x.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Halving(Layer):
    """Every second square of three by three numbers in time and pitch, a norm of each place, ReLU."""

    def __init__(self, name: str, before: int, after: int, eps: float) -> None:
        self.eps = eps
        self.kernel = Vector(f"{name}.conv.weight", after, before, _SIDE, _SIDE)
        self.scale = Vector(f"{name}.norm.weight", after)

    def __call__(self, x: Tensor) -> Tensor:
        """x [F, M, before] -> [F / 2, M / 2, after], rounded up."""
        made = functional.conv2d(x.permute(2, 0, 1)[None], self.kernel.vector, stride=2, padding=1)
        last, scale = made[0].permute(1, 2, 0), self.scale.vector
        return functional.relu(functional.layer_norm(last, scale.shape, scale, eps=self.eps))


class Block(Layer):
    """Half a feed-forward layer, attention, a convolution, half a feed-forward layer, a norm."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        self.limit = settings.positive("gradient_clipping")
        self.first = HalfFeedForward(context, settings, f"{name}.feed_forward1")
        self.attention = ClippedAttention(context, settings, name)
        self.convolution = CausalConvolution(context, settings, f"{name}.lconv1d")
        self.second = HalfFeedForward(context, settings, f"{name}.feed_forward2")
        self.last_norm = _norm(context, settings, f"{name}.norm_out")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        x = self.second(self.convolution(self.attention(self.first(x))))
        return self.last_norm(x.clamp(-self.limit, self.limit))


class HalfFeedForward(Layer):
    """``x + share * norm(down(silu(up(norm(x)))))``."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size = settings.integer("hidden_size")
        self.limit = settings.positive("gradient_clipping")
        self.share = settings.number("residual_weight")
        self.norm = _norm(context, settings, f"{name}.pre_layer_norm")
        self.up = _linear(context, settings, f"{name}.ffw_layer_1", size, 4 * size)
        self.down = _linear(context, settings, f"{name}.ffw_layer_2", 4 * size, size)
        self.last_norm = _norm(context, settings, f"{name}.post_layer_norm")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        made = functional.silu(self.up(self.norm(x.clamp(-self.limit, self.limit))))
        made = self.last_norm(self.down(made).clamp(-self.limit, self.limit))
        return made * self.share + x


class ClippedAttention(NearAttention):
    """Gemma 3n's, one state less far; keys are larger, and the sum is in single precision."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size, inner = settings.integer("hidden_size"), f"{name}.self_attn"
        self.num_heads = settings.integer("num_attention_heads")
        self.limit = settings.positive("gradient_clipping")
        self.cap = settings.positive("attention_logit_cap")
        self.block = settings.integer("attention_chunk_size", maximum=_WIDEST)
        self.before = settings.integer("attention_context_left", minimum=2, maximum=_WIDEST) - 1
        self.after, self.farthest = 0, self.before - 1
        settings.refuse("attention_context_right", 0)
        if size % (2 * self.num_heads) or (self.block + self.before) // 2 != self.before:
            raise UnsupportedModel(
                f"config.json: audio_config: hidden_size = {size}, num_attention_heads = {self.num_heads}, "
                f"attention_chunk_size = {self.block}, attention_context_left = {self.before + 1}: must be "
                "a multiple of twice the heads, and a context of one more than a chunk"
            )
        self.norm = _norm(context, settings, f"{name}.norm_pre_attn")
        self.query, self.key, self.value = (
            _linear(context, settings, f"{inner}.{part}_proj", size, size) for part in "qkv"
        )
        self.scales = Vector(f"{inner}.per_dim_scale", size // self.num_heads)
        self.distances = Linear(context, f"{inner}.relative_k_proj", size, [Part(size)])
        self.sines = sines(self.before, 0, size).to(context.device, getattr(torch, context.dtype))
        self.out = _linear(context, settings, f"{inner}.post", size, size)
        self.last_norm = _norm(context, settings, f"{name}.norm_post_attn")
        self.key_scale = math.log(1 + math.e) / math.log(2)

    def projected(self, x: Tensor) -> Sequence[Tensor]:
        query, key, value = (
            part(x).float().view(len(x), self.num_heads, -1)
            for part in (self.query, self.key, self.value)
        )
        return query, key * self.key_scale, value


class CausalConvolution(Layer):
    """``x + down(silu(norm(convolution(gated(up(norm(x)))))))``; a state hears those before it only."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        size, eps = settings.integer("hidden_size"), settings.number("rms_norm_eps")
        self.limit = settings.positive("gradient_clipping")
        self.width = settings.integer("conv_kernel_size", maximum=_WIDEST)
        self.norm = RMSNorm(context, f"{name}.pre_layer_norm", size, eps)
        self.up = _linear(context, settings, f"{name}.linear_start", size, 2 * size)
        self.kernel = Vector(f"{name}.depthwise_conv1d.weight", size, 1, self.width)
        self.inner_norm = RMSNorm(context, f"{name}.conv_norm", size, eps)
        self.down = _linear(context, settings, f"{name}.linear_end", size, size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        gated = functional.glu(self.up(self.norm(x)), dim=-1)
        padded = functional.pad(gated.t()[None], (self.width - 1, 0))
        made = functional.conv1d(padded, self.kernel.vector, groups=x.shape[1])[0].t()
        made = self.inner_norm(made.clamp(-self.limit, self.limit).contiguous())
        return x + self.down(functional.silu(made))


def _linear(
    context: BuildContext, settings: Settings, name: str, before: int, after: int
) -> ClippedLinear:
    clips = settings.flag("use_clipped_linears", True)
    return ClippedLinear(context, name, before, after, clips=clips)


def _norm(context: BuildContext, settings: Settings, name: str) -> RMSNorm:
    return RMSNorm(context, name, settings.integer("hidden_size"), _EPS)
