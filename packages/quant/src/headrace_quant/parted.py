"""Fused layers whose parts are stored differently: query in 4 bits beside a value in 8."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from headrace_core.linear import LinearMethod, LinearSpec, TensorSpec
from headrace_quant.ignored_layers import module_names

if TYPE_CHECKING:
    from torch import Tensor

Kind = TypeVar("Kind", bound=Hashable)


def method_by_name(
    spec: LinearSpec, kind_of: Callable[[str], Kind], make: Callable[[Kind], LinearMethod]
) -> LinearMethod:
    """The method of a layer, chosen by the checkpoint's names of its modules.

    Args:
        kind_of: how the module of a name is stored; equal for equal storage.
        make: the method of a kind.
    """
    kinds = [kind_of(name) for name in module_names(spec)]
    if len(set(kinds)) == 1:
        return make(kinds[0])
    return PartedMethod([make(kind) for kind in kinds])


class PartedMethod(LinearMethod):
    """Each part of a fused layer by a method of its own; their outputs stand side by side.

    Costs a product for each part, and a copy of the outputs.
    """

    def __init__(self, methods: Sequence[LinearMethod]) -> None:
        self.methods = tuple(methods)
        self.needs_whole = any(method.needs_whole for method in methods)  # type: ignore[misc]
        self.takes_views = all(method.takes_views for method in methods)

    def _specs(self, spec: LinearSpec) -> list[LinearSpec]:
        return [
            replace(spec, name=name, out_parts=(size,), part_names=())
            for name, size in zip(spec.part_names, spec.out_parts, strict=True)
        ]

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {
            f"{suffix}@{part}": replace(tensor, only_part=part)
            for part, own in enumerate(self._specs(spec))
            for suffix, tensor in self.methods[part].create(own).items()
        }

    def kept_bytes(self, spec: LinearSpec) -> int | None:
        """Bytes of all parts, if those of one are not the tensors' that it takes."""
        specs = self._specs(spec)
        kept = [method.kept_bytes(own) for method, own in zip(self.methods, specs, strict=True)]
        if all(each is None for each in kept):
            return None
        taken = [
            sum(
                math.prod(tensor.shape) * getattr(torch, tensor.dtype or spec.dtype).itemsize
                for tensor in method.create(own).values()
                if tensor.required
            )
            for method, own in zip(self.methods, specs, strict=True)
        ]
        return sum(own if each is None else each for own, each in zip(taken, kept, strict=True))

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> list[object]:
        found: list[dict[str, Tensor]] = [{} for _ in self.methods]
        for key, tensor in tensors.items():
            suffix, _, part = key.rpartition("@")
            found[int(part)][suffix] = tensor
        return [
            method.finish(own, mine)
            for method, own, mine in zip(self.methods, self._specs(spec), found, strict=True)
        ]

    def apply(self, state: list[object], x: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = [method.apply(mine, x) for method, mine in zip(self.methods, state, strict=True)]
        joined = torch.cat(outputs, dim=-1)
        return joined if bias is None else joined + bias
