"""Linear layers of which a router picks a few per token, and the term that all tokens get.

Letters: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace_core.linear import LinearSpec
from headrace_models.layers.base import WHOLE, Part, Shard, Slot, WeightLayer, slot_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class ExpertLinear(WeightLayer):
    """``x @ weight[e].T``: one matrix for each expert, all of one size.

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
        self.states: list[Any] = []

    def slots(self) -> Mapping[str, Slot]:
        return {
            f"{index}.{suffix}": slot_of(tensor, (self.part,), self.in_shard)
            for index, (spec, method) in enumerate(zip(self.specs, self.methods))
            for suffix, tensor in method.create(spec).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for index, (spec, method) in enumerate(zip(self.specs, self.methods)):
            start = f"{index}."
            own = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
            self.states.append(method.finish(spec, own))

    def __call__(self, expert: int, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], by one expert."""
        return self.methods[expert].apply(self.states[expert], x)


class Bias(WeightLayer):
    """What is added to every row."""

    weight: Tensor

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,), "float32", any_float=True)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape, float32."""
        return x.float() + self.weight
