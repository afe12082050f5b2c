"""Attention whose queries and outputs are projected by experts; keys and values all share.

Shen et al. 2023, arXiv:2306.04640 (mixture of attention heads, as JetMoE has it).

Letters: T tokens, H hidden size, E experts, k experts per token, Hk key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.linear import LinearSpec
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import WHOLE, Part, Shard, Slot, WeightLayer, slot_of
from headrace_models.layers.head_view import in_every_row
from headrace_models.layers.linear import column_parallel, shard_of
from headrace_models.layers.moe.router import Router, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear


class MixedAttention(Attention):
    """Each chosen expert makes Hk queries, one for each key-value head, and takes what they found.

    Args:
        routing: of the experts.
        arguments: of :class:`~headrace_models.layers.attention.self_attention.Attention`.
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


class ExpertLinear(WeightLayer):
    """``x @ weight[e].T``: one matrix for each expert, all of one size; together in core's
    ``expert_linear`` op if all come down to plain floats, together through their quantization method if
    that can join them, else each by itself.

    Args:
        name: as the checkpoint spells it; it holds all experts' in one tensor [E, out, in].
        in_features, part: sizes on this rank.
        in_shard: which columns of the weights this rank keeps.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        num_experts: int,
        in_features: int,
        part: Part,
        in_shard: Shard = WHOLE,
    ) -> None:
        self.name = name
        self.part, self.in_shard = part, in_shard
        self.specs = [
            LinearSpec(f"{name}.{index}", in_features, (part.size,), context.dtype)
            for index in range(num_experts)
        ]
        self.methods = [context.quant.for_layer(spec) for spec in self.specs]
        self.is_plain = all(method.is_plain for method in self.methods)
        self.takes_views = self.is_plain  # stacked, which copies
        self.ops = context.ops
        self.packed: PackedLinear | None = None
        self.states: list[Any] = []
        self.joined: Any = None

    def slots(self) -> Mapping[str, Slot]:
        return {
            f"{index}.{suffix}": slot_of(tensor, (self.part,), self.in_shard)
            for index, (spec, method) in enumerate(zip(self.specs, self.methods))
            for suffix, tensor in method.create(spec).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        each = [
            {n.removeprefix(f"{i}."): t for n, t in tensors.items() if n.startswith(f"{i}.")}
            for i in range(len(self.specs))
        ]
        layers = list(zip(self.methods, self.specs, each))
        if self.is_plain:
            weights = torch.stack([method.weight(spec, own) for method, spec, own in layers])
            self.packed = self.ops.expert_linear.pack(weights)
        else:
            self.states = [method.finish(spec, own) for method, spec, own in layers]
            if len({type(method) for method in self.methods}) == 1:
                self.joined = self.methods[0].join(self.states)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """See :class:`headrace_core.ops.ExpertLinearOp`."""
        if self.packed is not None:
            return self.ops.expert_linear(x, self.packed, ids, weights)
        if self.joined is not None:
            return self.methods[0].apply_routed(self.joined, x, ids, weights)
        return self._one_by_one(x, ids, weights)

    def _one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
        """One expert after the other. The rows that an expert gets depend on contents, so such steps are not
        captured."""
        out = x.new_empty((*ids.shape, self.part.size))
        for expert in torch.unique(ids).tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            own = x[rows] if x.dim() == 2 else x[rows, places]
            out[rows, places] = self.methods[expert].apply(self.states[expert], own)
        if weights is None:
            return out
        return (out.float() * weights[..., None]).sum(dim=1).to(x.dtype)


class Bias(WeightLayer):
    """A term that is added to every row."""

    weight: Tensor

    def __init__(self, context: BuildContext, name: str, size: int) -> None:
        self.name, self.ops, self.size = name, context.ops, size

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        return self.ops.add(x, in_every_row(self.weight, x.shape[0]))
