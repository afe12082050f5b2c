"""Zamba's transformer: one set of weights for several layers, each with a cache of its own and, if the model
has them, adapters. Glorioso et al. 2024, arXiv:2405.16712 and arXiv:2411.15242.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear, column_parallel, row_parallel
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


@dataclass(frozen=True, slots=True)
class TransformerSizes:
    """Sizes of the shared transformer, whose input is twice as wide as the stream."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    adapter_rank: int
    attention_adapters: bool
    mlp_adapters: bool

    @property
    def projected(self) -> tuple[int, int, int]:
        """Sizes of queries, keys and values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys


class CacheOnlyAttention(Attention):
    """Attention of a layer whose projections belong to another: a cache, and no weights.

    Args:
        arguments: of :class:`~headrace_models.layers.attention.self_attention.Attention`.
    """

    def __init__(self, context: BuildContext, name: str, **arguments: Any) -> None:
        super().__init__(context, name, **arguments)
        del self.qkv, self.out


class Adapter(Layer):
    """``b(a(x))`` of low rank for each of several outputs, side by side.

    Args:
        like: the layer whose outputs are adapted, as it is spread over the ranks.
        fused: the checkpoint has one ``b`` for all outputs.
    """

    def __init__(
        self, context: BuildContext, name: str, rank: int, like: Linear, *, fused: bool
    ) -> None:
        outputs = [list(like.parts)] if fused else [[part] for part in like.parts]
        width = like.spec.in_features
        self.down = Linear(context, f"{name}.0", width, [Part(rank)] * len(outputs))
        self.up = [Linear(context, f"{name}.1", rank, parts) for parts in outputs]

    def __call__(self, x: Tensor) -> list[Tensor]:
        """x [T, in_features] -> each output, [T, its size]."""
        inner = self.down(x).chunk(len(self.up), dim=-1)
        return [up(part) for up, part in zip(self.up, inner)]


class SharedTransformer(Layer):
    """``mlp(norm(attention(norm(x, embeddings))))``, with the cache of whoever calls. Heads and inner
    channels are spread over the ranks.

    Args:
        uses: which of the model's uses of shared transformers are of this one; adapters lie by that.
        num_uses: how many the model has.
    """

    no_adapters = "several layers use it, and adapters of transformers' differ by use"

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: TransformerSizes,
        *,
        activation: str,
        eps: float,
        bias: bool,
        uses: Sequence[int],
        num_uses: int,
    ) -> None:
        self.ops, self.sizes, self.activation = context.ops, sizes, activation
        hidden, inner, rank = sizes.hidden_size, sizes.intermediate_size, sizes.adapter_rank
        attention, mlp = f"{name}.self_attn", f"{name}.feed_forward"
        self.input_norm = RMSNorm(context, f"{name}.input_layernorm", 2 * hidden, eps)
        self.qkv = column_parallel(
            context,
            f"{attention}.qkv_proj",
            2 * hidden,
            sizes.projected,
            units=(sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads),
            part_names=tuple(f"{attention}.{part}_proj" for part in "qkv"),
        )
        self.out = row_parallel(context, f"{attention}.o_proj", sizes.projected[0], hidden)
        self.mlp_norm = RMSNorm(context, f"{name}.pre_ff_layernorm", hidden, eps)
        self.gate_up = column_parallel(
            context, f"{mlp}.gate_up_proj", hidden, (inner, inner), bias=bias
        )
        self.down = row_parallel(context, f"{mlp}.down_proj", inner, hidden, bias=bias)

        def adapters(wanted: bool, what: str, like: Linear, *, fused: bool) -> list[Any]:
            each = (
                Adapter(context, f"{what}.{use}", rank, like, fused=fused)
                if wanted and use in uses
                else None
                for use in range(num_uses)
            )
            return list(each)

        self.attention_adapters = adapters(
            sizes.attention_adapters, f"{attention}.linear_adapter_list", self.qkv, fused=False
        )
        self.mlp_adapters = adapters(
            sizes.mlp_adapters, f"{mlp}.gate_up_proj_adapter_list", self.gate_up, fused=True
        )

    def __call__(
        self, x: Tensor, attention: CacheOnlyAttention, use: int, batch: ForwardBatch
    ) -> Tensor:
        """x [T, 2 H], the stream and the embeddings -> [T, H]."""
        x = self.input_norm(x)
        heads = self._adapted(self.qkv(x), x, self.attention_adapters[use])
        heads = heads.view(x.shape[0], -1, self.sizes.head_dim)
        kv_heads = attention.spec.num_kv_heads
        counts = [attention.spec.num_heads, kv_heads, kv_heads]
        query, key, value = torch.split(heads, counts, dim=1)
        out = attention.attend(query, key, value, batch)
        x = self.mlp_norm(self.out(out.flatten(1)))
        inner = self._adapted(self.gate_up(x), x, self.mlp_adapters[use])
        return self.down(self.ops.activation_and_mul(inner, self.activation))

    def _adapted(self, out: Tensor, x: Tensor, adapter: Adapter | None) -> Tensor:
        """out [T, all outputs] with what the adapter makes of x, in place."""
        if adapter is not None:
            more = adapter(x)
            for part, own in zip(torch.split(out, [each.shape[1] for each in more], dim=1), more):
                self.ops.copy_rows(self.ops.add(part, own), part)
        return out
