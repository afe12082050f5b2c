"""Mixers by the gated delta rule: a state that forgets, and corrects what it recalls. Yang et al. 2024,
arXiv:2412.06464.

Letters: T tokens, Hk key heads of N channels, Hv value heads of P channels, C channels of the
convolution: those of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import Linear, column_parallel, row_parallel, shard_of
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.gated_norm import GatedRMSNorm
from headrace_models.layers.recurrent.state_layer import RecurrentLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.recurrent.state_layer import StateArguments

_EPS = 1e-6
"""Epsilon of the division of queries and keys by their length."""


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Sizes of the mixers, of a config.

    Raises:
        UnsupportedModel: value heads that cannot be spread over the key heads.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise UnsupportedModel(
                f"config.json: {self.num_value_heads} value heads of a delta net must be a multiple of "
                f"its {self.num_key_heads} key heads"
            )

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_dim


class DeltaNet(RecurrentLayer):
    """Base of these mixers: all between the projections. Key heads are spread over the ranks, and
    value heads with them.

    Args:
        norm_name, out_name: the checkpoint's module names below ``name``.
        norm_activation: of the gate of the norm behind the rule.
        by_channel: a decay for each channel of the key (Kimi), instead of one for each value head.
        beta_scale: 2 lets the state turn its sign (OLMo hybrid).
        lower_bound: of a decay's logarithm (Ling 3); None: any.
        flat_rates: ``A_log`` is stored [Hv] also where decays are by channel.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: DeltaSizes,
        *,
        activation: str,
        norm_eps: float,
        norm_name: str = "norm",
        out_name: str = "out_proj",
        norm_activation: str = "silu",
        by_channel: bool = False,
        beta_scale: float = 1.0,
        lower_bound: float | None = None,
        flat_rates: bool = False,
    ) -> None:
        shard = shard_of(sizes.num_key_heads, context.communicator, what=f"{name}, key heads")
        if context.communicator.world_size > shard.count:
            raise UnsupportedModel(
                f"{name}: {sizes.num_key_heads} key heads cannot be spread over "
                f"tensor_parallel_size = {context.communicator.world_size}"
            )
        keys, values = (Part(size // shard.count, shard) for size in (sizes.keys, sizes.values))
        heads = Part(sizes.num_value_heads // shard.count, shard)
        conv = CausalConv(
            context,
            f"{name}.conv1d",
            (keys, keys, values),
            sizes.taps,
            bias=False,
            activation=activation,
        )
        held = StateShape((heads.size, sizes.key_dim, sizes.value_dim), "float32")
        super().__init__(context, name, (conv.state_shape(), held))
        self.sizes = sizes
        self.conv = conv
        self.conv_parts = [part.size for part in conv.parts]
        self.rule = DeltaRule(
            context,
            name,
            heads,
            sizes.key_dim,
            by_channel=by_channel,
            flat_rates=flat_rates,
            beta_scale=beta_scale,
            lower_bound=lower_bound,
        )
        self.norm = GatedRMSNorm(
            context,
            f"{name}.{norm_name}",
            values,
            norm_eps,
            groups=sizes.num_value_heads,
            norm_first=True,
            shared=True,
            activation=norm_activation,
        )
        self.out_proj = row_parallel(context, f"{name}.{out_name}", sizes.values, sizes.hidden_size)

    def mix(
        self, inner: Tensor, decay: Tensor, beta: Tensor, gate: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """inner [T, C], decay [T, Hv] or [T, Hv, N], beta [T, Hv], gate [T, Hv * P] -> [T, hidden]."""
        sizes = self.sizes
        inner = self.conv(inner, self.state(0, batch))
        query, key, value = torch.split(inner, self.conv_parts, dim=-1)
        out = self.rule(
            by_heads(query, sizes.key_dim),
            by_heads(key, sizes.key_dim),
            by_heads(value, sizes.value_dim),
            decay,
            beta,
            self.state(1, batch),
        )
        return self.out_proj(self.norm(out.flatten(1), gate))


class GatedDeltaNet(DeltaNet):
    """Qwen3-Next's mixer and its like: queries, keys, values and the norm's gate in one product, what
    decides of decay and correction in another.

    Args:
        arguments: of :class:`DeltaNet`.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: DeltaSizes, **arguments: object
    ) -> None:
        super().__init__(context, name, sizes, **arguments)  # type: ignore[arg-type]
        units = sizes.num_key_heads
        self.inputs = column_parallel(
            context,
            f"{name}.in_proj_qkvz",
            sizes.hidden_size,
            (sizes.keys, sizes.keys, sizes.values, sizes.values),
            units=(units,) * 4,
        )
        heads = sizes.num_value_heads
        self.gates = column_parallel(
            context, f"{name}.in_proj_ba", sizes.hidden_size, (heads, heads), units=(units,) * 2
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        channels = self.conv.channels
        inputs = self.inputs(x)
        beta, decay = self.gates(x).chunk(2, dim=-1)
        return self.mix(inputs[:, :channels], decay, beta, inputs[:, channels:], batch)


class KimiDeltaAttention(DeltaNet):
    """Kimi's mixer: decays by channel and the norm's gate come of products of low rank. Kimi Team 2025,
    arXiv:2510.26692.

    Args:
        arguments: of :class:`DeltaNet`.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: DeltaSizes, **arguments: object
    ) -> None:
        super().__init__(
            context,
            name,
            sizes,
            norm_name="o_norm",
            out_name="o_proj",
            norm_activation="sigmoid",
            by_channel=True,
            **arguments,  # type: ignore[arg-type]
        )
        hidden, units = sizes.hidden_size, sizes.num_key_heads
        self.inputs = column_parallel(
            context,
            f"{name}.qkv_proj",
            hidden,
            (sizes.keys, sizes.keys, sizes.values),
            units=(units,) * 3,
            part_names=tuple(f"{name}.{part}_proj" for part in "qkv"),
        )
        self.beta = column_parallel(
            context, f"{name}.b_proj", hidden, (sizes.num_value_heads,), units=(units,)
        )
        ranks = (Part(sizes.key_dim), Part(sizes.value_dim))
        names = (f"{name}.f_a_proj", f"{name}.g_a_proj")
        self.down = Linear(context, f"{name}.fg_a_proj", hidden, ranks, part_names=names)
        self.decay = column_parallel(
            context, f"{name}.f_b_proj", sizes.key_dim, (sizes.keys,), units=(units,)
        )
        self.gate = column_parallel(
            context, f"{name}.g_b_proj", sizes.value_dim, (sizes.values,), units=(units,)
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        sizes = self.sizes
        for_decay, for_gate = torch.split(self.down(x), [sizes.key_dim, sizes.value_dim], dim=-1)
        decay = by_heads(self.decay(for_decay), sizes.key_dim)
        return self.mix(self.inputs(x), decay, self.beta(x), self.gate(for_gate), batch)


class DirectDeltaAttention(DeltaNet):
    """Kimi's mixer with decays and the norm's gate in one product each (Ling 3).

    Args:
        arguments: of :class:`DeltaNet`.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: DeltaSizes, **arguments: object
    ) -> None:
        super().__init__(
            context,
            name,
            sizes,
            norm_name="o_norm",
            out_name="o_proj",
            norm_activation="sigmoid",
            by_channel=True,
            flat_rates=True,
            **arguments,  # type: ignore[arg-type]
        )
        units = sizes.num_key_heads
        self.inputs = column_parallel(
            context,
            f"{name}.qkvfg_proj",
            sizes.hidden_size,
            (sizes.keys, sizes.keys, sizes.values, sizes.keys, sizes.values),
            units=(units,) * 5,
            part_names=tuple(f"{name}.{part}_proj" for part in "qkvfg"),
        )
        self.beta = column_parallel(
            context, f"{name}.b_proj", sizes.hidden_size, (sizes.num_value_heads,), units=(units,)
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        keys, _, values = self.conv_parts
        inner, decay, gate = torch.split(self.inputs(x), [self.conv.channels, keys, values], dim=-1)
        return self.mix(inner, by_heads(decay, self.sizes.key_dim), self.beta(x), gate, batch)


class DeltaRule(WeightLayer):
    """See :class:`headrace_core.ops.DeltaRuleOp`.

    Args:
        name: of the mixer.
        own: the value heads that this rank keeps.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        own: Part,
        key_dim: int,
        *,
        by_channel: bool,
        flat_rates: bool,
        beta_scale: float,
        lower_bound: float | None,
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.own, self.key_dim = own, key_dim
        self.by_channel, self.flat_rates = by_channel, flat_rates
        self.beta_scale, self.lower_bound = beta_scale, lower_bound

    def slots(self) -> Mapping[str, Slot]:
        heads = Slot((self.own.size,), "float32", parts=(self.own,), any_float=True)
        if not self.by_channel:
            return {"A_log": heads, "dt_bias": heads}
        channels = Part(self.own.size * self.key_dim, self.own.shard)
        rates = Slot(
            (1, 1, self.own.size, 1), "float32", parts=(self.own,), part_dim=2, any_float=True
        )
        biases = Slot((channels.size,), "float32", parts=(channels,), any_float=True)
        return {"A_log": heads if self.flat_rates else rates, "dt_bias": biases}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.rates, self.bias = tensors["A_log"].flatten(), tensors["dt_bias"]
        if self.by_channel:
            self.bias = self.bias.view(-1, self.key_dim)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
        state: StateArguments,
    ) -> Tensor:  # fmt: skip
        """query, key [T, Hk, N], value [T, Hv, P], decay and beta as :meth:`DeltaNet.mix` -> value's
        shape."""
        return self.ops.delta_rule(
            query,
            key,
            value,
            decay,
            beta,
            self.rates,
            self.bias,
            *state,
            scale=self.key_dim**-0.5,
            l2_norm_eps=_EPS,
            beta_scale=self.beta_scale,
            lower_bound=self.lower_bound,
        )
