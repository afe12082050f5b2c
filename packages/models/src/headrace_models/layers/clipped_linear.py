"""A product whose inputs and results stay within bounds (Gemma 4's towers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer, Part, Slot, WeightLayer
from headrace_models.layers.linear import Linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def clipped_rules(source: str, target: str) -> list[WeightRule]:
    """Rules of a :class:`ClippedLinear`: its names in the checkpoint and in the model."""
    bounds = [WeightRule(f"{source}.{x}", f"{target}.bounds.{x}") for x in _BOUNDS]
    return [WeightRule(f"{source}.linear", f"{target}.linear"), *bounds]


class ClippedLinear(Layer):
    """A product whose inputs and results stay within bounds, if the checkpoint has any."""

    def __init__(
        self, context: BuildContext, name: str, before: int, after: int, *, clips: bool
    ) -> None:
        self.linear = Linear(context, f"{name}.linear", before, [Part(after)])
        self.bounds = _Bounds(name) if clips else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, before] -> [T, after]."""
        if self.bounds is None:
            return self.linear(x)
        low, high, least, most = self.bounds.values
        return self.linear(x.clamp(low, high)).clamp(least, most)


class _Bounds(WeightLayer):
    """Four numbers: of the inputs, and of the results."""

    def __init__(self, name: str) -> None:
        self.name = name

    def slots(self) -> Mapping[str, Slot]:
        return {bound: Slot((), "float32", any_float=True) for bound in _BOUNDS}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.values = [float(tensors[bound]) for bound in _BOUNDS]
