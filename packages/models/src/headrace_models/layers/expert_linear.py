"""Linear layers of which a router picks a few per token, and the term that all tokens get.

Letters: T tokens, H hidden size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.linear import LinearSpec
from headrace_models.layers.base import WHOLE, Part, Shard, Slot, WeightLayer, slot_of
from headrace_models.layers.head_view import in_every_row

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear


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
        """Which rows an expert gets depends on contents, so such steps are not captured."""
        out = x.new_empty((*ids.shape, self.part.size))
        for expert in torch.unique(ids).tolist():
            rows, places = (ids == expert).nonzero(as_tuple=True)
            own = x[rows] if x.dim() == 2 else x[rows, places]
            out[rows, places] = self.methods[expert].apply(self.states[expert], own)
        if weights is None:
            return out
        return (out.float() * weights[..., None]).sum(dim=1).to(x.dtype)


class Bias(WeightLayer):
    """What is added to every row."""

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
