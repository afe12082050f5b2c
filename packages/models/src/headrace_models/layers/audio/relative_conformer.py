"""A Conformer whose states see each other at learned distances, behind convolutions over time and pitch:
Phi-4-multimodal's encoder.

Abouelenin et al. 2025, arXiv:2503.01743, section 2.2; blocks: Gulati et al. 2020, arXiv:2005.08100; biases of
distances: Raffel et al. 2020, arXiv:1910.10683. Letters: F frames, M mel bins, L states, W states of a
window, H hidden size, C channels, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.audio.conformer import Pointwise
from headrace_models.layers.base import Layer, Part, Slot, WeightLayer
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24, "num_attention_heads": 16,
    "chunk_size": -1, "ext_pw_out_channel": 1024, "depthwise_separable_out_channel": 1024,
    "depthwise_multiplier": 1, "kernel_size": 3, "input_size": 80, "time_reduction": 8,
    "bias_max_distance": 1000, "nemo_conv_channels": 1024,
}  # fmt: skip
"""Values that configs may leave out."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "activation": ("swish", "silu"), "conv_activation": ("swish", "silu"),
    "conv_glu_type": ("swish", "silu"), "nemo_activation": ("relu",), "bias_symmetric": (False,),
}  # fmt: skip
_EPS = 1e-5
_WINDOW = 500
"""States that see each other."""
_WINDOWS_AT_ONCE = 4
_STATES_AT_ONCE = 256
"""Convolved together: their channels take much memory."""
_MOST_HALVINGS = 6
_PLACES = (0, *(place for step in range(1, _MOST_HALVINGS) for place in (3 * step - 1, 3 * step)))
"""Of convolutions among what checkpoints number, activations included."""
_FARTHEST, _LONGEST_KERNEL = 1 << 12, 1 << 8


def relative_conformer_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`RelativeConformer`: its names in the checkpoint and in the model."""
    block, own = f"{source}.encoders.{{}}", f"{target}.layers.{{}}"
    plain = {
        "feed_forward_in.layer_norm": "first.norm", "feed_forward_in.gate_up_proj": "first.up",
        "feed_forward_in.down_proj": "first.down", "layer_norm_att": "attention_norm",
        "self_attn.q_proj": "query", "self_attn.k_proj": "key", "self_attn.v_proj": "value",
        "self_attn.o_proj": "out", "conv.layer_norm": "convolution.norm",
        "conv.glu.ext_pw_conv_1d": "convolution.up", "conv.glu.b1": "convolution.shift.vector",
        "conv.glu.b2": "convolution.gate_shift.vector",
        "conv.dw_sep_conv_1d.dw_conv": "convolution.depthwise",
        "conv.dw_sep_conv_1d.pw_conv": "convolution.mixed", "conv.ext_pw_conv_1d": "convolution.down",
        "feed_forward_out.layer_norm": "last.norm", "feed_forward_out.gate_up_proj": "last.up",
        "feed_forward_out.down_proj": "last.down", "layer_norm": "last_norm",
    }  # fmt: skip
    return (
        WeightRule(f"{source}.encoder_embedding.global_mean", f"{target}.mean.vector"),
        WeightRule(f"{source}.encoder_embedding.global_invstd", f"{target}.scale.vector"),
        *(
            WeightRule(f"{source}.embed.conv.{place}", f"{target}.begin.convolutions.{index}")
            for index, place in enumerate(_PLACES)
        ),
        WeightRule(f"{source}.embed.out", f"{target}.begin.out"),
        WeightRule(
            f"{source}.relative_attention_bias_layer.bias_values.weight",
            f"{target}.distances.vector",
        ),
        *(WeightRule(f"{block}.{name}", f"{own}.{mine}") for name, mine in plain.items()),
    )


class RelativeConformer(Layer):
    """Spectrogram frames of a recording -> a state for every eight.

    Args:
        stated: the encoder's part of the config, in transformers' names.
        name: as the checkpoint spells it.

    Raises:
        UnsupportedModel: the config says something else than states that see their window.
    """

    def __init__(self, context: BuildContext, stated: Mapping[str, Any], name: str) -> None:
        settings = Settings({**_DEFAULTS, **stated})
        for key, accepted in _ONLY.items():
            settings.refuse(key, *accepted)
        settings.refuse("chunk_size", -1)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        bins, self.size = settings.integer("input_size"), settings.integer("hidden_size")
        self.mean = Vector(f"{name}.encoder_embedding.global_mean", bins)
        self.scale = Vector(f"{name}.encoder_embedding.global_invstd", bins)
        self.begin = Begin(context, settings, f"{name}.embed")
        self.farthest = settings.integer("bias_max_distance", maximum=_FARTHEST)
        self.num_heads = settings.integer("num_attention_heads")
        if self.size % self.num_heads:
            raise UnsupportedModel(
                f"config.json: audio_config.hidden_size = {self.size}: must be so many whole heads as "
                f"num_attention_heads = {self.num_heads}"
            )
        bias = f"{name}.relative_attention_bias_layer.bias_values.weight"
        self.distances = Vector(bias, 2 * self.farthest, self.num_heads)
        self.layers = [
            RelativeBlock(context, settings, f"{name}.encoders.{index}")
            for index in range(settings.integer("num_blocks", maximum=MAX_LAYERS))
        ]

    def __call__(self, frames: Tensor) -> Tensor:
        """frames [F, M] of one recording -> [ceil(F / 8), H]. Zeros fill up the last of several windows, and
        are seen."""
        x = self.begin((frames.to(self.dtype) - self.mean.vector) * self.scale.vector)
        number = len(x)
        if number > _WINDOW:
            x = functional.pad(x, (0, 0, 0, -number % _WINDOW))
        windows = x.view(-1, min(number, _WINDOW), self.size)
        bias = self._bias(windows.shape[1])
        parts = torch.split(windows, _WINDOWS_AT_ONCE)
        return torch.cat([self._seen(part, bias) for part in parts]).flatten(0, 1)[:number]

    def _bias(self, number: int) -> Tensor:
        """[heads, number, number]: what is added for the distance of each two states."""
        places = torch.arange(number, device=self.distances.vector.device)
        apart = (places - places[:, None]).clamp(-self.farthest, self.farthest - 1)
        return self.distances.vector[apart + self.farthest].permute(2, 0, 1)

    def _seen(self, windows: Tensor, bias: Tensor) -> Tensor:
        """[N, W, H] -> [N, W, H]."""
        for layer in self.layers:
            windows = layer(windows, bias)
        return windows


class Begin(Layer):
    """Convolutions that halve time and pitch, the first of all channels, the others of each by itself before
    they are mixed.

    Raises:
        UnsupportedModel: ``time_reduction`` is no power of 2.
    """

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        self.factor = settings.integer("time_reduction", minimum=2, maximum=1 << _MOST_HALVINGS)
        halvings = self.factor.bit_length() - 1
        if self.factor != 1 << halvings:
            raise UnsupportedModel(
                f"config.json: audio_config.time_reduction = {self.factor}: must be a power of 2"
            )
        channels, height = settings.integer("nemo_conv_channels"), settings.integer("input_size")
        names = [f"{name}.conv.{place}" for place in _PLACES[: 2 * halvings - 1]]
        each = (channels, 1, 3, 3)
        self.convolutions = [Convolution(names[0], each, stride=2, padding=1)]
        for one, other in zip(names[1::2], names[2::2], strict=True):
            self.convolutions += [
                Convolution(one, each, stride=2, padding=1, groups=channels),
                Convolution(other, (channels, channels, 1, 1)),
            ]
        for _ in range(halvings):
            height = (height + 1) // 2
        hidden = settings.integer("hidden_size")
        self.out = Linear(context, f"{name}.out", channels * height, [Part(hidden)], bias=True)

    def __call__(self, frames: Tensor) -> Tensor:
        """[F, M] -> [ceil(F / factor), H]."""
        found = []
        for first in range(0, len(frames), _STATES_AT_ONCE * self.factor):
            before = self.factor if first else 0  # the first state sees frames before its own
            part = frames[first - before : first + _STATES_AT_ONCE * self.factor]
            found.append(self._convolved(part)[before // self.factor :])
        return torch.cat(found)

    def _convolved(self, frames: Tensor) -> Tensor:
        x = frames[None, None]
        for index, convolution in enumerate(self.convolutions):
            x = convolution(x)
            if index % 2 == 0:  # not between those of each channel and their mixture
                x = functional.relu(x)
        return self.out(x[0].transpose(0, 1).flatten(1))


class Convolution(WeightLayer):
    """A convolution with a bias, over one dimension or two.

    Args:
        shape: of its weight: channels, those of the input that each takes, sizes.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
    ) -> None:
        self.name, self.shape = name, shape
        self.stride, self.padding, self.groups = stride, padding, groups

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot(self.shape), "bias": Slot(self.shape[:1])}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors["bias"]

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, C, ...] -> [N, channels, ...]."""
        convolve = functional.conv2d if len(self.shape) == 4 else functional.conv1d
        return convolve(x, self.weight, self.bias, self.stride, self.padding, 1, self.groups)


class RelativeBlock(Layer):
    """Half a feed-forward layer, attention, a convolution, half a feed-forward layer, a norm."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        hidden, self.num_heads = (
            settings.integer(key) for key in ("hidden_size", "num_attention_heads")
        )
        self.first = FeedForward(context, settings, f"{name}.feed_forward_in")
        self.attention_norm = LayerNorm(context, f"{name}.layer_norm_att", hidden, _EPS)
        self.query, self.key, self.value, self.out = (
            Linear(context, f"{name}.self_attn.{which}_proj", hidden, [Part(hidden)], bias=True)
            for which in "qkvo"
        )
        self.convolution = ConvolutionBlock(context, settings, f"{name}.conv")
        self.last = FeedForward(context, settings, f"{name}.feed_forward_out")
        self.last_norm = LayerNorm(context, f"{name}.layer_norm", hidden, _EPS)

    def __call__(self, windows: Tensor, bias: Tensor) -> Tensor:
        """windows [N, W, H], bias [heads, W, W] -> [N, W, H]."""
        x = windows.flatten(0, 1)
        x = x + 0.5 * self.first(x)
        normed = self.attention_norm(x)
        q, k, v = (
            layer(normed).view(*windows.shape[:2], self.num_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        x = x + self.out(seen.transpose(1, 2).flatten(2).flatten(0, 1))
        x = x + self.convolution(x.view(windows.shape)).flatten(0, 1)
        return self.last_norm(x + 0.5 * self.last(x)).view(windows.shape)


class FeedForward(Layer):
    """``down(up * silu(gate))`` of what a norm makes; the gate is the second half."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        hidden, inner = settings.integer("hidden_size"), settings.integer("intermediate_size")
        self.norm = LayerNorm(context, f"{name}.layer_norm", hidden, _EPS)
        self.up = Linear(context, f"{name}.gate_up_proj", hidden, [Part(2 * inner)], bias=True)
        self.down = Linear(context, f"{name}.down_proj", inner, [Part(hidden)], bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        up, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.down(up * functional.silu(gate))


class ConvolutionBlock(Layer):
    """Channels with gates, each convolved over the states up to its own, mixed twice."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        hidden, channels = (settings.integer(key) for key in ("hidden_size", "ext_pw_out_channel"))
        mixed = settings.integer("depthwise_separable_out_channel")
        each = hidden * settings.integer("depthwise_multiplier")
        if channels != hidden or mixed != hidden:
            raise UnsupportedModel(
                f"config.json: audio_config.ext_pw_out_channel = {channels}, "
                f"depthwise_separable_out_channel = {mixed}: must be hidden_size = {hidden}"
            )
        self.width = settings.integer("kernel_size", maximum=_LONGEST_KERNEL)
        self.norm = LayerNorm(context, f"{name}.layer_norm", hidden, _EPS)
        self.up = Pointwise(context, f"{name}.glu.ext_pw_conv_1d", hidden, 2 * channels)
        self.shift = Vector(f"{name}.glu.b1", 1, channels, 1)
        self.gate_shift = Vector(f"{name}.glu.b2", 1, channels, 1)
        self.depthwise = Convolution(
            f"{name}.dw_sep_conv_1d.dw_conv", (each, 1, self.width), groups=hidden
        )
        self.mixed = Pointwise(context, f"{name}.dw_sep_conv_1d.pw_conv", each, mixed)
        self.down = Pointwise(context, f"{name}.ext_pw_conv_1d", mixed, channels)

    def __call__(self, windows: Tensor) -> Tensor:
        """[N, W, H] -> [N, W, H]."""
        up, gate = self.up(self.norm(windows.flatten(0, 1))).chunk(2, dim=-1)
        shift, gate_shift = self.shift.vector.flatten(), self.gate_shift.vector.flatten()
        x = ((up + shift) * functional.silu(gate + gate_shift)).view(*windows.shape[:2], -1)
        x = functional.pad(x.transpose(1, 2), (self.width - 1, 0))
        x = self.mixed(self.depthwise(x).transpose(1, 2).flatten(0, 1))
        return self.down(functional.silu(x)).view(windows.shape)
