"""Mamba 2's mixer: a convolution, then a state-space scan of each head. Dao and Gu 2024,
arXiv:2405.21060.

Letters: T tokens, H heads of P channels, G groups of heads, N length of a channel's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import column_parallel, row_parallel, shard_of
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.gated_norm import GatedRMSNorm
from headrace_models.layers.recurrent.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.recurrent.state_layer import StateArguments


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """Sizes of the mixers, of a config.

    Raises:
        UnsupportedModel: heads that cannot be divided into groups.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    taps: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModel(
                f"config.json: {self.num_heads} heads of a Mamba 2 mixer cannot be divided into "
                f"{self.num_groups} groups"
            )

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim


class Mamba2Mixer(RecurrentLayer):
    """Heads are spread over the ranks, and groups with them.

    Args:
        norm_eps: of the gated norm behind the scan; None: the gate alone.
        norm_first: see :class:`headrace_core.ops.GatedRMSNormOp`.
        out_bias: of the last projection; default: as of the first.
        dt_limits: bounds of the step.
        multipliers: of gate, input, key, query and step, as they are projected (Falcon-H1).
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: Mamba2Sizes,
        *,
        activation: str,
        bias: bool,
        conv_bias: bool,
        norm_eps: float | None,
        norm_first: bool = False,
        out_bias: bool | None = None,
        multipliers: Sequence[float] = (1.0,) * 5,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        ranks = context.communicator
        heads = shard_of(sizes.num_heads, ranks, what=f"{name}, heads")
        groups = shard_of(sizes.num_groups, ranks, what=f"{name}, groups")
        channels = Part(sizes.channels // heads.count, heads)
        vectors = Part(sizes.num_groups * sizes.state_size // groups.count, groups)
        conv = CausalConv(
            context,
            f"{name}.conv1d",
            (channels, vectors, vectors),
            sizes.taps,
            bias=conv_bias,
            activation=activation,
            multipliers=() if set(multipliers[1:4]) == {1.0} else multipliers[1:4],
        )
        own_heads = sizes.num_heads // heads.count
        scanned = StateShape((own_heads, sizes.head_dim, sizes.state_size), "float32")
        super().__init__(context, name, (conv.state_shape(), scanned))
        self.ops, self.sizes = context.ops, sizes
        self.gate_multiplier, self.step_multiplier = multipliers[0], multipliers[4]
        self.parts = [channels.size, conv.channels, own_heads]
        self.conv_parts = [part.size for part in conv.parts]
        length, size = sizes.num_groups * sizes.state_size, sizes.channels
        self.in_proj = column_parallel(
            context,
            f"{name}.in_proj",
            sizes.hidden_size,
            (size, size, length, length, sizes.num_heads),
            units=(
                sizes.num_heads, sizes.num_heads, sizes.num_groups, sizes.num_groups,
                sizes.num_heads,
            ),
            bias=bias,
        )  # fmt: skip
        self.conv = conv
        self.scan = StateSpaceScan(context, name, Part(own_heads, heads), dt_limits)
        self.norm: GatedRMSNorm | None = None
        if norm_eps is not None:
            self.norm = GatedRMSNorm(
                context,
                f"{name}.norm",
                channels,
                norm_eps,
                groups=sizes.num_groups,
                norm_first=norm_first,
            )
        self.out_proj = row_parallel(
            context,
            f"{name}.out_proj",
            sizes.channels,
            sizes.hidden_size,
            bias=bias if out_bias is None else out_bias,
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        sizes = self.sizes
        gate, inner, step = torch.split(self.in_proj(x), self.parts, dim=-1)
        if self.gate_multiplier != 1.0:
            gate = self.ops.scale(gate, self.gate_multiplier)
        if self.step_multiplier != 1.0:
            step = self.ops.scale(step, self.step_multiplier)
        inner = self.conv(inner, self.state(0, batch))
        inner, key, query = torch.split(inner, self.conv_parts, dim=-1)
        out = self.scan(
            by_heads(inner, sizes.head_dim),
            step,
            by_heads(key, sizes.state_size),
            by_heads(query, sizes.state_size),
            self.state(1, batch),
        )
        out = out.flatten(1)
        if self.norm is None:
            return self.out_proj(self.ops.gate(out, gate, activation="silu"))
        return self.out_proj(self.norm(out, gate))


class StateSpaceScan(WeightLayer):
    """See :class:`headrace_core.ops.StateSpaceScanOp`.

    Args:
        name: of the mixer.
        own: the heads that this rank keeps.
    """

    def __init__(
        self, context: BuildContext, name: str, own: Part, dt_limits: tuple[float, float]
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.own, self.dt_limits = own, dt_limits

    def slots(self) -> Mapping[str, Slot]:
        each = Slot((self.own.size,), "float32", parts=(self.own,), any_float=True)
        return {"A_log": each, "D": each, "dt_bias": each}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.rates = -torch.exp(tensors["A_log"])
        self.skip, self.step_bias = tensors["D"], tensors["dt_bias"]

    def __call__(
        self, x: Tensor, step: Tensor, key: Tensor, query: Tensor, state: StateArguments
    ) -> Tensor:
        """x [T, H, P], step [T, H], key and query [T, G, N] -> [T, H, P]."""
        return self.ops.state_space_scan(
            x, step, self.rates, key, query, self.skip, *state,
            dt_bias=self.step_bias, dt_limits=self.dt_limits,
        )  # fmt: skip
