"""RWKV 4: a recurrence that trains like attention, in both halves of a block, which mix each token with the
one before. Peng et al. 2023, arXiv:2305.13048.

Block: ``h = x + time_mixing(norm(x)); h + channel_mixing(norm(h))``; the first one norms x itself first.

Letters: T tokens, C channels (of the average: of this rank).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.kv import StateShape
from headrace_core.model import WeightRule
from headrace_core.ops.optional.wkv import WKV
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.linear import Linear, column_parallel, dividing_shard, row_parallel
from headrace_models.layers.norm import LayerNorm, NormLayer
from headrace_models.layers.recurrent.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.recurrent.state_layer import StateArguments

_BLOCK = "rwkv.blocks.{}"
_FINAL_EPS = 1e-5
"""Epsilon of the final norm; the config's value is ignored."""


class TimeMixing(RecurrentLayer):
    """``out(sigmoid(receptance) * wkv(key, value))``: what stands for attention. Channels of the average
    are spread over the ranks."""

    def __init__(self, context: BuildContext, name: str, hidden_size: int, channels: int) -> None:
        shard = dividing_shard(channels, context.communicator, what=f"{name}, channels")
        own = Part(channels // shard.count, shard)
        last = StateShape((hidden_size, 1), context.dtype)
        super().__init__(context, name, (last, last, last, StateShape((3, own.size), "float32")))
        self.ops = context.ops
        self.mix = TokenShift(context, name, ("key", "value", "receptance"), hidden_size)
        self.key = column_parallel(context, f"{name}.key", hidden_size, (channels,))
        self.value = column_parallel(context, f"{name}.value", hidden_size, (channels,))
        self.receptance = column_parallel(context, f"{name}.receptance", hidden_size, (channels,))
        self.average = WeightedAverage(context, name, own)
        self.output = row_parallel(context, f"{name}.output", channels, hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        mixed = self.mix(x, [self.state(index, batch) for index in range(3)])
        key, value = self.key(mixed[0]), self.value(mixed[1])
        out = self.average(key, value, self.state(3, batch))
        return self.output(self.ops.gate(out, self.receptance(mixed[2]), activation="sigmoid"))


class ChannelMixing(RecurrentLayer):
    """``sigmoid(receptance) * value(relu(key)^2)``: what stands for the MLP. The inner channels are spread
    over the ranks; every rank has all of the gate."""

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, intermediate_size: int
    ) -> None:
        last = StateShape((hidden_size, 1), context.dtype)
        super().__init__(context, name, (last, last))
        self.ops = context.ops
        self.mix = TokenShift(context, name, ("key", "receptance"), hidden_size)
        self.key = column_parallel(context, f"{name}.key", hidden_size, (intermediate_size,))
        self.receptance = Linear(context, f"{name}.receptance", hidden_size, [Part(hidden_size)])
        self.value = row_parallel(context, f"{name}.value", intermediate_size, hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        mixed = self.mix(x, [self.state(index, batch) for index in range(2)])
        value = self.value(self.key.activated(mixed[0], "relu2"))
        return self.ops.gate(value, self.receptance(mixed[1]), activation="sigmoid")


class TokenShift(WeightLayer):
    """``m x_t + (1 - m) x_{t - 1}``, a convolution of two taps, with an m for each purpose.

    Args:
        purposes: as the checkpoint spells them.
    """

    def __init__(
        self, context: BuildContext, name: str, purposes: Sequence[str], channels: int
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.purposes, self.channels = tuple(purposes), channels
        self.taps: list[Tensor] = []

    def slots(self) -> Mapping[str, Slot]:
        return {f"time_mix_{purpose}": Slot((1, 1, self.channels)) for purpose in self.purposes}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        shares = [tensors[f"time_mix_{purpose}"].flatten() for purpose in self.purposes]
        self.taps = [torch.stack((1 - share, share)).contiguous().T for share in shares]

    def __call__(self, x: Tensor, states: Sequence[StateArguments]) -> list[Tensor]:
        """x [T, C] -> the same shape, for each purpose."""
        conv = self.ops.causal_conv
        return [conv(x, taps, None, *state) for taps, state in zip(self.taps, states)]


class WeightedAverage(WeightLayer):
    """See :class:`headrace_core.ops.optional.wkv.WKVOp`.

    Args:
        own: the channels that this rank keeps.
    """

    def __init__(self, context: BuildContext, name: str, own: Part) -> None:
        self.name, self.own = name, own
        self.wkv = context.ops.optional(WKV)

    def slots(self) -> Mapping[str, Slot]:
        each = Slot((self.own.size,), "float32", parts=(self.own,), any_float=True)
        return {"time_decay": each, "time_first": each}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.decay, self.first = -torch.exp(tensors["time_decay"]), tensors["time_first"]

    def __call__(self, key: Tensor, value: Tensor, state: StateArguments) -> Tensor:
        """key, value [T, C] -> the same shape."""
        return self.wkv(key, value, self.decay, self.first, *state)


class RwkvBlock(Block):
    """``h = x + attention(norm(x)); h + feed_forward(norm(h))``; the first block norms x itself first."""

    def __init__(
        self,
        first_norm: NormLayer | None,
        attention_norm: NormLayer,
        attention: TimeMixing,
        mixing_norm: NormLayer,
        mixing: ChannelMixing,
    ) -> None:
        self.first_norm = first_norm
        self.attention_norm = attention_norm
        self.attention = attention
        self.mixing_norm = mixing_norm
        self.mixing = mixing

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        if self.first_norm is not None:
            x = self.first_norm(x)
        x, stream = self.attention_norm.add(x, residual)
        x, stream = self.mixing_norm.add(self.attention(x, batch), stream)
        return self.mixing(x, batch), stream


class RwkvForCausalLM(Decoder):
    """RWKV/rwkv-4-169m-pile to 14b. transformers halves the stream every few layers, against float16's
    range; what is left of that behind a norm is its eps."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("rwkv.embeddings", "embed"),
        WeightRule(f"{_BLOCK}.pre_ln", "layers.{}.first_norm"),
        WeightRule(f"{_BLOCK}.ln1", "layers.{}.attention_norm"),
        WeightRule(f"{_BLOCK}.attention", "layers.{}.attention"),
        *(
            WeightRule(
                f"{_BLOCK}.{half}.time_mix_{purpose}", f"layers.{{}}.{to}.mix.time_mix_{purpose}"
            )
            for half, to in (("attention", "attention"), ("feed_forward", "mixing"))
            for purpose in ("key", "value", "receptance")
        ),
        WeightRule(f"{_BLOCK}.attention.time_decay", "layers.{}.attention.average.time_decay"),
        WeightRule(f"{_BLOCK}.attention.time_first", "layers.{}.attention.average.time_first"),
        WeightRule(f"{_BLOCK}.ln2", "layers.{}.mixing_norm"),
        WeightRule(f"{_BLOCK}.feed_forward", "layers.{}.mixing"),
        WeightRule("rwkv.ln_out", "final_norm"),
        WeightRule("head", "head"),
    )
    embedding_name: ClassVar[str] = "rwkv.embeddings"
    blocks_name: ClassVar[str] = "rwkv.blocks"
    head_name: ClassVar[str] = "head"

    def make_norm(
        self, context: BuildContext, name: str, depth: int, eps: float | None = None
    ) -> NormLayer:
        """A norm of the stream behind so many layers; its eps is by default the config's."""
        every = self.settings.integer("rescale_every", 6, minimum=-1)
        if eps is None:
            eps = self.settings.number("layer_norm_epsilon", 1e-5)
        halvings = depth // every if every > 0 else 0
        return LayerNorm(context, name, self.hidden_size(), eps * 4.0**halvings)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        name = f"{prefix}rwkv.ln_out"
        return self.make_norm(context, name, self.num_layers(), _FINAL_EPS)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        hidden = self.hidden_size()
        channels = self.settings.integer("attention_hidden_size", hidden)
        inner = self.settings.integer("intermediate_size", 4 * hidden)
        return RwkvBlock(
            None if index else self.make_norm(context, f"{name}.pre_ln", 0),
            self.make_norm(context, f"{name}.ln1", index),
            TimeMixing(context, f"{name}.attention", hidden, channels),
            self.make_norm(context, f"{name}.ln2", index),
            ChannelMixing(context, f"{name}.feed_forward", hidden, inner),
        )
