"""A Conformer in which states see their block, at learned distances: Granite Speech's encoder.

Gulati et al. 2020, arXiv:2005.08100; distances: Shaw et al. 2018, arXiv:1803.02155; its own guesses of the
text are heard again in the middle: Nozaki and Komatsu 2021, arXiv:2104.02724. Letters: L states of a
recording, B states of a block, H hidden size, C channels of a convolution, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part, Slot, WeightLayer
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear

_EPS = 1e-5
_BATCH_EPS = 1e-5
_LONGEST_BLOCK = 1 << 12
"""States: a table of every two of them is made in each layer."""
_BLOCKS_AT_ONCE = 32
"""Blocks that look at each other's table together: memory is that of so many, however long the recording."""


def conformer_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Conformer`: its names in the checkpoint and in the model."""
    layer, own = f"{source}.layers.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.input_linear", f"{target}.first"),
        WeightRule(f"{source}.out", f"{target}.guess"),
        WeightRule(f"{source}.out_mid", f"{target}.heard"),
        *(
            rule
            for half in ("ff1", "ff2")
            for rule in (
                WeightRule(f"{layer}.{half}.pre_norm", f"{own}.{half}_norm"),
                WeightRule(f"{layer}.{half}.up_proj", f"{own}.{half}.up"),
                WeightRule(f"{layer}.{half}.down_proj", f"{own}.{half}.down"),
            )
        ),
        WeightRule(f"{layer}.attn.pre_norm", f"{own}.attention_norm"),
        WeightRule(f"{layer}.attn.to_q", f"{own}.attention.query"),
        WeightRule(f"{layer}.attn.to_kv", f"{own}.attention.key_value"),
        WeightRule(f"{layer}.attn.to_out", f"{own}.attention.out"),
        WeightRule(f"{layer}.attn.rel_pos_emb.weight", f"{own}.attention.distances.vector"),
        WeightRule(f"{layer}.conv.norm", f"{own}.convolution_norm"),
        WeightRule(f"{layer}.conv.up_conv", f"{own}.convolution.up"),
        WeightRule(f"{layer}.conv.depth_conv.conv", f"{own}.convolution.depthwise"),
        WeightRule(f"{layer}.conv.batch_norm", f"{own}.convolution.scaled"),
        WeightRule(f"{layer}.conv.down_conv", f"{own}.convolution.down"),
        WeightRule(f"{layer}.post_norm", f"{own}.last_norm"),
    )


def unread_weights(source: str) -> Mapping[str, str]:
    """Tensors that are not read: pattern of the whole name -> why."""
    return {
        rf"{source}\.layers\.\d+\.conv\.batch_norm\.num_batches_tracked": "a count of training steps"
    }


class Conformer(Layer):
    """Spectrogram frames -> states. The output of the middle layer is heard as text, and what that guesses is
    added to it.

    Args:
        settings: the encoder's part of the config.
        name: as the checkpoint spells it.
        kept: layers whose outputs stand in front of the last one's, side by side; 0 is the first one's
            input.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, kept: Sequence[int] = ()
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        hidden, texts = settings.integer("hidden_dim"), settings.integer("output_dim")
        number = settings.integer("num_layers", maximum=MAX_LAYERS)
        self.kept, self.middle = frozenset(kept), number // 2
        self.first = _linear(context, f"{name}.input_linear", settings.integer("input_dim"), hidden)
        self.layers = [
            ConformerBlock(context, settings, f"{name}.layers.{index}") for index in range(number)
        ]
        self.guess = _linear(context, f"{name}.out", hidden, texts)
        self.heard = _linear(context, f"{name}.out_mid", texts, hidden)

    def __call__(self, frames: Tensor) -> Tensor:
        """frames [L, bins] of one recording -> [L, H], or H times more where layers are kept."""
        x = self.first(frames.to(self.dtype))
        found = [x] if 0 in self.kept else []
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if number == self.middle:
                x = x + self.heard(self.guess(x).softmax(-1))
            if number in self.kept:
                found.append(x)
        return torch.cat([*found, x], dim=-1)


class ConformerBlock(Layer):
    """Half a feed-forward layer, attention, a convolution, half a feed-forward layer, a norm."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        hidden = settings.integer("hidden_dim")
        self.ff1_norm = LayerNorm(context, f"{name}.ff1.pre_norm", hidden, _EPS)
        self.ff1 = _feed_forward(context, settings, f"{name}.ff1")
        self.attention_norm = LayerNorm(context, f"{name}.attn.pre_norm", hidden, _EPS)
        self.attention = BlockAttention(context, settings, f"{name}.attn")
        self.convolution_norm = LayerNorm(context, f"{name}.conv.norm", hidden, _EPS)
        self.convolution = Convolution(context, settings, f"{name}.conv")
        self.ff2_norm = LayerNorm(context, f"{name}.ff2.pre_norm", hidden, _EPS)
        self.ff2 = _feed_forward(context, settings, f"{name}.ff2")
        self.last_norm = LayerNorm(context, f"{name}.post_norm", hidden, _EPS)

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, H] -> [L, H]."""
        x = x + 0.5 * self.ff1(self.ff1_norm(x))
        x = x + self.attention(self.attention_norm(x))
        x = x + self.convolution(self.convolution_norm(x))
        return self.last_norm(x + 0.5 * self.ff2(self.ff2_norm(x)))


def _feed_forward(context: BuildContext, settings: Settings, name: str) -> MLP:
    hidden = settings.integer("hidden_dim")
    between = hidden * settings.integer("feedforward_mult")
    return MLP(context, f"{name}.up_proj", f"{name}.down_proj", hidden, between, "silu")


class BlockAttention(Layer):
    """States of a block see each other; what a query says to a vector of the distance is added."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        hidden, self.num_heads = settings.integer("hidden_dim"), settings.integer("num_heads")
        stated = settings.optional_integer("dim_head")
        self.head_dim = hidden // self.num_heads if stated is None else stated
        self.block = settings.integer("context_size", maximum=_LONGEST_BLOCK)
        self.farthest = settings.integer("max_pos_emb", maximum=_LONGEST_BLOCK)
        if self.block > self.farthest:
            raise UnsupportedModel(
                f"config.json: encoder_config.context_size = {self.block}: must be at most max_pos_emb = "
                f"{self.farthest}"
            )
        inner = self.num_heads * self.head_dim
        self.query = Linear(context, f"{name}.to_q", hidden, [Part(inner)])
        self.key_value = Linear(context, f"{name}.to_kv", hidden, [Part(2 * inner)])
        self.out = _linear(context, f"{name}.to_out", inner, hidden)
        self.distances = Vector(f"{name}.rel_pos_emb.weight", 2 * self.farthest + 1, self.head_dim)

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, H] -> [L, H]; the last block may be shorter."""
        query, (key, value) = self.query(x), self.key_value(x).chunk(2, dim=-1)
        step = self.block * _BLOCKS_AT_ONCE
        parts = zip(*(torch.split(x, step) for x in (query, key, value)), strict=True)
        return self.out(torch.cat([seen for part in parts for seen in self._blocks(*part)]))

    def _blocks(self, *states: Tensor) -> Iterator[Tensor]:
        """What whole blocks see, and what a shorter one behind them sees."""
        whole = len(states[0]) // self.block * self.block
        if whole:
            yield self._attend(*(x[:whole].reshape(-1, self.block, x.shape[1]) for x in states))
        if whole < len(states[0]):
            yield self._attend(*(x[whole:][None] for x in states))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Blocks [N, B, heads * D] of each -> [N * B, heads * D]."""
        q, k, v = (
            x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for x in (query, key, value)
        )
        scale = self.head_dim**-0.5
        places = torch.arange(q.shape[2], device=q.device)
        table = self.distances.vector[places[:, None] - places + self.farthest]  # [B, B, D]
        bias = torch.einsum("nhqd,qkd->nhqk", q, table) * scale
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class Convolution(Layer):
    """More channels, half of which are gates; a convolution of each over time; fewer channels again."""

    def __init__(self, context: BuildContext, settings: Settings, name: str) -> None:
        hidden = settings.integer("hidden_dim")
        channels = hidden * settings.integer("conv_expansion_factor")
        width = settings.integer("conv_kernel_size", maximum=_LONGEST_BLOCK)
        self.up = Pointwise(context, f"{name}.up_conv", hidden, 2 * channels)
        self.depthwise = Depthwise(f"{name}.depth_conv.conv", channels, width)
        self.scaled = BatchScale(f"{name}.batch_norm", channels)
        self.down = Pointwise(context, f"{name}.down_conv", channels, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, H] -> [L, H]."""
        x = self.depthwise(functional.glu(self.up(x), dim=-1))
        return self.down(functional.silu(self.scaled(x)))


class Pointwise(WeightLayer):
    """A convolution of width 1, which is a product."""

    def __init__(self, context: BuildContext, name: str, in_size: int, out_size: int) -> None:
        self.name, self.ops = name, context.ops
        self.in_size, self.out_size = in_size, out_size
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        shape = (self.out_size, self.in_size, 1)
        return {"weight": Slot(shape), "bias": Slot((self.out_size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.packed = self.ops.linear.pack(tensors["weight"][:, :, 0].contiguous())
        self.bias = tensors["bias"]

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, in_size] -> [L, out_size]."""
        assert self.packed is not None, self.name
        return self.ops.linear(x, self.packed, self.bias)


class Depthwise(WeightLayer):
    """Each channel is convolved over time by itself; before and behind is silence.

    Args:
        before: states of silence before; None: half of the width, of an even one one more than behind.
    """

    weight: Tensor

    def __init__(self, name: str, channels: int, width: int, *, before: int | None = None) -> None:
        self.name, self.channels, self.width = name, channels, width
        self.before = width // 2 if before is None else before

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.channels, 1, self.width))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, C] -> [L, C]."""
        padded = functional.pad(x.t()[None], (self.before, self.width - 1 - self.before))
        return functional.conv1d(padded, self.weight, groups=self.channels)[0].t().contiguous()


class BatchScale(WeightLayer):
    """A trained batch norm: each channel has a factor and a summand."""

    factor: Tensor
    summand: Tensor

    def __init__(self, name: str, channels: int) -> None:
        self.name, self.channels = name, channels

    def slots(self) -> Mapping[str, Slot]:
        names = ("weight", "bias", "running_mean", "running_var")
        return dict.fromkeys(names, Slot((self.channels,)))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        weight, bias, mean, variance = (tensors[name].float() for name in self.slots())
        factor = weight * torch.rsqrt(variance + _BATCH_EPS)
        dtype = tensors["weight"].dtype
        self.factor, self.summand = factor.to(dtype), (bias - mean * factor).to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [L, C] -> [L, C]."""
        return torch.addcmul(self.summand, x, self.factor)


def _linear(context: BuildContext, name: str, in_size: int, out_size: int) -> Linear:
    return Linear(context, name, in_size, [Part(out_size)], bias=True)
