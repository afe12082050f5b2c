"""Attention to keys and values of the layer's own besides the context's, as openPangu Pro has it: some that
are learned stand before every request.

Letters: T tokens, S learned keys, Hk key-value heads, D size of a query's and a key's head, V of a value's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.nn.functional import pad

from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.linear import shard_of
from headrace_models.layers.narrow_values import NarrowValueAttention
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class PrefixedAttention(NarrowValueAttention):
    """Learned keys pass through the keys' norm and do not turn.

    Args:
        count: S.
        learned_values: whether they have values; else zeros.
        key_norm: of all keys.
        arguments: of :class:`~headrace_models.layers.narrow_values.NarrowValueAttention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        count: int,
        learned_values: bool,
        key_norm: RMSNorm,
        **arguments: Any,
    ) -> None:
        super().__init__(
            context,
            name,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            key_norm=key_norm,
            prefix=True,
            **arguments,
        )
        shard = shard_of(num_kv_heads, context.communicator, what=f"{name}, key-value heads")
        own = Part(num_kv_heads // shard.count, shard)
        self.learned_keys = Learned(f"{name}.param_sink_key", (count, own.size, head_dim), own)
        self.learned_values: Learned | None = None
        if learned_values:
            shape = (count, own.size, value_dim)
            self.learned_values = Learned(f"{name}.param_sink_value", shape, own)

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        super().bind_cache(kv_cache, group)
        assert self.key_norm is not None
        key = self.key_norm(self.learned_keys.weight)
        value = key.new_zeros(key.shape)
        if self.learned_values is not None:
            value = pad(self.learned_values.weight, (0, self.head_dim - self.value_dim))
        self.spec = replace(self.spec, prefix_key=key, prefix_value=value)


class Learned(WeightLayer):
    """A tensor [S, Hk, size], its heads spread over the ranks."""

    weight: Tensor

    def __init__(self, name: str, shape: tuple[int, int, int], heads: Part) -> None:
        self.name, self.shape, self.heads = name, shape, heads

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot(self.shape, parts=(self.heads,), part_dim=1)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]
