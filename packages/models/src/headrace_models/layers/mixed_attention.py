"""Attention whose queries and outputs are projected by experts; keys and values all share.

Shen et al. 2023, arXiv:2306.04640 (mixture of attention heads, as JetMoE has it). Letters: T tokens,
H hidden size, k experts per token, Hk key-value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.attention import Attention
from headrace_models.layers.base import Part
from headrace_models.layers.expert_linear import Bias, ExpertLinear
from headrace_models.layers.linear import column_parallel, shard_of
from headrace_models.layers.router import Router, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


class MixedAttention(Attention):
    """Each chosen expert makes Hk queries, one for each key-value head, and takes what they found.

    Args:
        routing: of the experts.
        arguments: of :class:`~headrace_models.layers.attention.Attention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        routing: Routing,
        hidden_size: int,
        num_kv_heads: int,
        head_dim: int,
        **arguments: Any,
    ) -> None:
        self.communicator = context.communicator
        ranks = self.communicator.world_size
        if num_kv_heads % ranks:
            raise UnsupportedModel(
                f"{name}: {num_kv_heads} heads of each expert cannot be divided over "
                f"tensor_parallel_size = {ranks}"
            )
        super().__init__(
            context,
            name,
            hidden_size=hidden_size,
            num_heads=routing.top_k * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            **arguments,
        )
        del self.out  # experts project
        experts, size = f"{name}.experts", num_kv_heads * head_dim
        shard = shard_of(num_kv_heads, context.communicator, what=f"{name}, key-value heads")
        self.qkv = column_parallel(
            context, f"{name}.kv_proj", hidden_size, (size, size), units=(num_kv_heads,) * 2
        )
        self.router = Router(context, f"{experts}.router.layer", hidden_size, routing)
        own, count = size // shard.count, routing.num_experts
        self.queries = ExpertLinear(
            context, f"{experts}.input_linear", count, hidden_size, Part(own, shard, num_kv_heads)
        )
        self.outs = ExpertLinear(
            context, f"{experts}.output_linear", count, own, Part(hidden_size), shard
        )
        self.bias = Bias(context, f"{experts}.bias", hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, H] -> the same shape."""
        weights, ids = self.router(x)
        kv_heads, size = self.spec.num_kv_heads, self.head_dim
        sizes = (*ids.shape, kv_heads, size)
        # Heads that read the same keys follow each other.
        query = self._turned(self.queries(x, ids).view(sizes)).flatten(1, 2)
        both = self.qkv(x).view(x.shape[0], -1, size)
        key, value = torch.split(both, kv_heads, dim=1)
        found = self.attend(query, key, value, batch)
        by_expert = self._turned(found.view(ids.shape[0], kv_heads, ids.shape[1], size)).flatten(2)
        out = self.outs(by_expert, ids, weights)
        if self.communicator.world_size > 1:
            out = self.communicator.all_reduce(out)
        return self.bias(out)

    def _turned(self, x: Tensor) -> Tensor:
        """[T, A, B, D] -> [T, B, A, D], contiguous."""
        tokens, first, second, size = x.shape
        out = x.new_empty((tokens, second, first, size))
        for place in range(first):
            self.ops.copy_rows(x[:, place], out[:, :, place])
        return out
