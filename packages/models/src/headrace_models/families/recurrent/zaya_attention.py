"""Compressed convolutional attention (CCA): queries and keys are mixed by two short convolutions, values
come in part of the token before. Figliolia et al. 2025, arXiv:2510.04476, as ZAYA has it.

Letters: T tokens, Hq query heads, Hk key-value heads, D head size, C channels of queries and keys, K taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.head_view import by_heads, in_every_row, in_rows
from headrace_models.layers.linear import Linear
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

MAX_CHANNELS = 16_384
_LEAST = 1e-20
"""Least mean square of a head."""


@dataclass(frozen=True, slots=True)
class CCASizes:
    """Sizes of the layers, of a config.

    Raises:
        UnsupportedModel: heads of an odd size, half of which cannot be another token's; so many channels
            that the matrix of their means would be gigabytes.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, int]
    """Taps of the convolution of each channel, and of that within each head."""

    def __post_init__(self) -> None:
        if self.channels > MAX_CHANNELS:
            raise UnsupportedModel(
                f"config.json: {self.channels} channels of queries and keys: must be at most "
                f"{MAX_CHANNELS}"
            )
        if self.values % 2:
            raise UnsupportedModel(
                f"config.json: {self.num_kv_heads} value heads of {self.head_dim}: half of their "
                "channels must be a whole number"
            )

    @property
    def channels(self) -> int:
        return (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def values(self) -> int:
        return self.num_kv_heads * self.head_dim


class ConvolvedAttention(Attention):
    """``out(attend(unit(convolved q and k), values))``, on one rank.

    Args:
        arguments: of :class:`~headrace_models.layers.attention.self_attention.Attention`.

    Raises:
        UnsupportedModel: there are several ranks.
    """

    def __init__(self, context: BuildContext, name: str, sizes: CCASizes, **arguments: Any) -> None:
        if context.communicator.world_size > 1:
            raise UnsupportedModel(
                f"{name}: its convolutions cannot be divided over tensor_parallel_size = "
                f"{context.communicator.world_size}: set 1"
            )
        super().__init__(
            context,
            name,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            **arguments,
        )
        projections, half = f"{name}.qkv_proj", sizes.values // 2
        names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
        parts = (sizes.num_heads * sizes.head_dim, sizes.values, half, half)
        self.qkv = Linear(
            context,
            projections,
            sizes.hidden_size,
            [Part(size) for size in parts],
            part_names=tuple(f"{projections}.{part}" for part in names),
        )
        self.mixer = HeadMixer(context, projections, sizes)
        self.values = DelayedValues(context, f"{name}.delay", sizes.values)
        self.unit = UnitHeads(context, f"{name}.qk_norm", sizes)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        inputs, size = self.qkv(x), self.head_dim
        channels = inputs.shape[1] - self.values.channels
        value = by_heads(self.values(inputs[:, channels:], batch), size)
        heads = by_heads(self.mixer(inputs[:, :channels], batch), size)
        counts = [self.spec.num_heads, self.spec.num_kv_heads]
        query, key = self.unit(*torch.split(heads, counts, dim=1))
        return self.out(in_rows(self.attend(query, key, value, batch)))


class HeadMixer(RecurrentLayer):
    """Convolutions of queries and keys, plus what they are without: each query's mean with its key, and
    each key's mean over these.

    Args:
        name: of the module of the projections.
    """

    def __init__(self, context: BuildContext, name: str, sizes: CCASizes) -> None:
        own = Part(sizes.channels)
        conv = CausalConv(
            context, f"{name}.conv_qk_depthwise", (own,), sizes.taps[0], bias=True, activation=None
        )
        # One state for each step back, as each is an op of its own.
        before = StateShape((sizes.channels, sizes.taps[1] - 1), context.dtype)
        states = (conv.state_shape(), *(before for _ in range(sizes.taps[1] - 1)))
        super().__init__(context, name, states)
        self.ops, self.head_dim = context.ops, sizes.head_dim
        self.conv = conv
        self.within = WithinHeads(context, f"{name}.conv_qk_grouped", sizes)
        self.means = context.ops.linear.pack(_means(sizes, context))

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, C] -> the same shape."""
        conv, within = self.ops.causal_conv, self.within
        # Before a request both convolutions see zeros: the bias of the first goes into the second's.
        inner = conv(x, self.conv.weight, None, *self.state(0, batch))
        out = self.ops.linear(x, self.means)
        for back, packed in enumerate(within.packed):
            then = inner
            if back:
                then = conv(inner, within.steps[back], None, *self.state(back, batch))
            found = self.ops.head_linear(by_heads(then, self.head_dim), packed)
            out = self.ops.add(out, in_rows(found))
        assert self.conv.bias is not None
        return self.ops.add(out, in_every_row(within.whole_bias(self.conv.bias), out.shape[0]))


class WithinHeads(WeightLayer):
    """A convolution in which the channels of a head meet: weight [C, D, K], bias [C]."""

    def __init__(self, context: BuildContext, name: str, sizes: CCASizes) -> None:
        self.name, self.context, self.sizes = name, context, sizes
        self.packed: list[Any] = []
        self.steps: list[Tensor] = []
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        channels, size, taps = self.sizes.channels, self.sizes.head_dim, self.sizes.taps[1]
        return {"weight": Slot((channels, size, taps)), "bias": Slot((channels,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """``packed`` and ``steps`` begin with the token itself."""
        size, taps = self.sizes.head_dim, self.sizes.taps[1]
        by_tap = tensors["weight"].view(-1, size, size, taps).unbind(-1)[::-1]
        pack = self.context.ops.head_linear.pack
        self.packed = [pack(weight.contiguous()) for weight in by_tap]
        self.total, self.own_bias = sum(by_tap[1:], by_tap[0]), tensors["bias"]
        self.bias = None
        shown = torch.eye(taps, dtype=self.own_bias.dtype, device=self.own_bias.device).flip(0)
        self.steps = [row.expand(self.sizes.channels, -1).contiguous() for row in shown]

    def whole_bias(self, before: Tensor) -> Tensor:
        """[C]: its own and what it makes of that of the convolution before."""
        if self.bias is None:
            heads = before.view(-1, self.sizes.head_dim).float()
            made = torch.einsum("hnk,hk->hn", self.total.float(), heads).flatten()
            self.bias = (made + self.own_bias.float()).to(before.dtype)
        return self.bias


class DelayedValues(RecurrentLayer):
    """The first half of the channels as they are, the other half as they were one token ago."""

    def __init__(self, context: BuildContext, name: str, channels: int) -> None:
        super().__init__(context, name, (StateShape((channels, 1), context.dtype),))
        self.ops, self.channels = context.ops, channels
        taps = torch.zeros((channels, 2), dtype=getattr(torch, context.dtype))
        taps[: channels // 2, 1] = 1
        taps[channels // 2 :, 0] = 1
        self.taps = taps.to(context.device)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, channels] -> the same shape."""
        return self.ops.causal_conv(x, self.taps, None, *self.state(0, batch))


class UnitHeads(WeightLayer):
    """Heads of length ``sqrt(D)``, keys times a number for each head (``temp``)."""

    def __init__(self, context: BuildContext, name: str, sizes: CCASizes) -> None:
        self.name, self.ops, self.sizes = name, context.ops, sizes
        ones = torch.ones(sizes.head_dim, dtype=getattr(torch, context.dtype))
        self.ones = ones.to(context.device)

    def slots(self) -> Mapping[str, Slot]:
        return {"temp": Slot((self.sizes.num_kv_heads,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.temperatures = tensors["temp"].repeat_interleave(self.sizes.head_dim)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query [T, Hq, D], key [T, Hk, D] -> the same shapes."""
        query, key = (self.ops.rms_norm(x, self.ones, _LEAST) for x in (query, key))
        rows = in_rows(key)
        key = self.ops.gate(rows, in_every_row(self.temperatures, rows.shape[0]))
        return query, by_heads(key, self.sizes.head_dim)


def _means(sizes: CCASizes, context: BuildContext) -> Tensor:
    """[C, C]: from queries and keys to the means that are added to what is convolved."""
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    group = heads // kv_heads
    by_head = torch.zeros((heads + kv_heads, heads + kv_heads))
    for head in range(heads):
        by_head[head, head] = by_head[head, heads + head // group] = 0.5
    for head in range(kv_heads):
        by_head[heads + head] = by_head[head * group : (head + 1) * group].mean(0)
    whole = torch.kron(by_head, torch.eye(sizes.head_dim))
    return whole.to(getattr(torch, context.dtype)).to(context.device)
