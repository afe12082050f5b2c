"""Attention whose values are narrower than its keys, as MiMo-V2-Flash has it.

The cache's values are as wide as its keys. Behind what the projection gives they repeat it, so that their
largest magnitude stays what it is; nobody reads what attention makes of that.
Letters: T tokens, Hk key-value heads, D size of a query's and a key's head, V of a value's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import column_parallel, row_parallel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class PaddedValueAttention(Attention):
    """See :class:`~headrace_models.layers.attention.self_attention.Attention`.

    Args:
        value_dim: V.
        value_scale: what values are multiplied by; the output is, which comes to the same.
        arguments: of that.

    Raises:
        UnsupportedModel: values are wider than keys.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        value_scale: float = 1.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        **arguments: Any,
    ) -> None:
        if value_dim > head_dim:
            raise UnsupportedModel(
                f"config.json: v_head_dim = {value_dim}: must be at most head_dim = {head_dim}"
            )
        super().__init__(
            context,
            name,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            **arguments,
        )
        self.value_dim, self.value_scale = value_dim, value_scale
        self.qkv = column_parallel(
            context,
            f"{name}.qkv_proj",
            hidden_size,
            (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim),
            units=(num_heads, num_kv_heads, num_kv_heads),
            bias=qkv_bias,
            part_names=tuple(f"{name}.{part}_proj" for part in "qkv"),
        )
        self.out = row_parallel(
            context, f"{name}.o_proj", num_heads * value_dim, hidden_size, bias=out_bias
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> query [T, Hq, D], key and value [T, Hk, D]."""
        tokens, size, kv = x.shape[0], self.head_dim, self.spec.num_kv_heads
        sizes = [self.spec.num_heads * size, kv * size, kv * self.value_dim]
        query, key, value = torch.split(self.qkv(x), sizes, dim=1)
        wide = x.new_empty((tokens, kv, size))
        for start in range(0, size, self.value_dim):
            part = wide[..., start : start + self.value_dim]
            self.ops.copy_rows(by_heads(value, self.value_dim)[..., : part.shape[2]], part)
        return by_heads(query, size), by_heads(key, size), wide

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        wide = self.attend(*self.project(x), batch)
        out = x.new_empty((x.shape[0], wide.shape[1] * self.value_dim))
        self.ops.copy_rows(wide[..., : self.value_dim], by_heads(out, self.value_dim))
        if self.value_scale != 1.0:
            out = self.ops.scale(out, self.value_scale)
        return self.out(out)
