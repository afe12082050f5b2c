"""Layers of FP8 checkpoints: which stay packed, and which become floats while they are loaded.

A layer stays packed where a rank's inputs end with groups of inputs that share a scale; rows may end
anywhere, because scales of blocks are written out for each row. Modules that no layer of the model asks
for by their name (latent attention's ``kv_b_proj``, experts in one tensor) become floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headrace_core.errors import WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, TensorSpec
from headrace_core.ops import OpTable, PackedLinear
from headrace_quant.fp8.tensors import Fp8Layout
from headrace_quant.ignored_layers import module_names
from headrace_quant.none import PlainWeight
from headrace_quant.small_floats import FloatLayout, SmallFloatWeight

if TYPE_CHECKING:
    from torch import Tensor

LEAST_GROUP = 32
"""Inputs that share a scale at least: with fewer, float32 scales would take more than 1/8 of the codes."""
FLOATS = "weight_floats"
"""Suffix of a weight that a checkpoint holds in floats where FP8 was expected."""
_STACKED = ".gate_up_proj"
_BY_HEAD = ".kv_b_proj"
"""End of the name of latent attention's projection, which is multiplied head by head, and in floats
(DeepSeek-AI 2024, arXiv:2405.04434)."""


class Packing(NamedTuple):
    """How the tensors of one module are brought into a layer's."""

    layout: FloatLayout
    num_parts: int
    """Parts of the layer that are one module in the checkpoint, and share its scale."""
    may_be_floats: bool
    """The layer also takes :data:`FLOATS`."""


def packed_layout(block: tuple[int, int] | None, inputs: int) -> FloatLayout | None:
    """Layout of a packed layer; None: it becomes floats.

    Args:
        block: rows and columns that share a scale; None: the tensor has one.
        inputs: of a rank.
    """
    if block is None:
        return FloatLayout("e4m3", "weight", None, "float", None, outer="weight_scale")
    columns = block[1]
    if columns >= 1 << 31:
        return FloatLayout("e4m3", "weight", "weight_scale", "float", None)
    size = math.gcd(inputs, columns)
    if size < LEAST_GROUP:
        return None
    return FloatLayout("e4m3", "weight", "weight_scale", "float", size)


class Fp8Layers:
    """The layers of one model, as its checkpoint's reader must know them.

    Args:
        may_be_floats: modules that the config says are in FP8 may be in floats.
    """

    def __init__(self, ops: OpTable, *, may_be_floats: bool = False) -> None:
        self.ops, self.may_be_floats = ops, may_be_floats
        self._packings: dict[str, Packing] = {}

    def kept(
        self, module: str, weight: Tensor, scale: Tensor, layout: Fp8Layout
    ) -> dict[str, Tensor] | None:
        """The tensors of a module by suffix, as its layer has them; None: it becomes floats."""
        packing = self._packings.get(module)
        if packing is None or weight.dim() != 2:
            return None
        rows, inputs = weight.shape
        scales = packed_scales(scale, layout.block, (rows, inputs), packing)
        return {"weight": weight, "weight_scale": scales}

    def with_stand_ins(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The same, and for modules that come in floats what their layers wait for."""
        for name, tensor, file in tensors:
            module, _, last = name.rpartition(".")
            packing = self._packings.get(module) if last == "weight" else None
            if packing is None or not packing.may_be_floats or not _is_floats(tensor):
                yield name, tensor, file
                continue
            for suffix, found in stand_in(tensor, packing).items():
                yield f"{module}.{suffix}", found, file

    def method(
        self, spec: LinearSpec, parts: Sequence[str] | None, layout: Fp8Layout
    ) -> LinearMethod:
        """The method of a layer, or of those of its parts that are named."""
        names = module_names(spec) if parts is None else parts
        form = packed_layout(layout.block, spec.in_features)
        if form is None or _is_floats_here(spec):
            return PlainWeight(self.ops)
        num_parts = 1 if spec.part_names else max(1, len(spec.out_parts))
        may_be_floats = self.may_be_floats and parts is None
        for name in names:
            self._packings[name] = Packing(form, num_parts, may_be_floats)
        if may_be_floats:
            return EitherWeight(self.ops, form, activations=layout.activations)
        return SmallFloatWeight(self.ops, form, activations=layout.activations)


def _is_floats_here(spec: LinearSpec) -> bool:
    """True of layers that their models multiply in floats only."""
    is_stacked = ".experts." in spec.name and spec.name.endswith(_STACKED)
    return spec.name.endswith(_BY_HEAD) or (is_stacked and not spec.part_names)


def _is_floats(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)


def packed_scales(
    scale: Tensor, block: tuple[int, int] | None, shape: tuple[int, int], packing: Packing
) -> Tensor:
    """A stored scale as the layer has it: float32 [parts], [N, 1] or [N, K / g].

    Args:
        shape: N and K of the whole module.
    """
    scale = scale.float()
    if block is None:
        return scale.reshape(1).expand(packing.num_parts).contiguous()
    (rows, columns), (outputs, inputs) = block, shape
    by_row = scale.repeat_interleave(rows, 0)[:outputs]
    size = packing.layout.group_size
    if size is None:
        return by_row.contiguous()
    return by_row[:, torch.arange(0, inputs, size, device=scale.device) // columns].contiguous()


def stand_in(weight: Tensor, packing: Packing) -> dict[str, Tensor]:
    """Tensors of zeros, which take no memory, for a module in floats; :data:`FLOATS` replaces them."""
    rows, inputs = weight.shape
    codes = torch.zeros((), dtype=torch.float8_e4m3fn, device=weight.device)
    ones = torch.ones((), dtype=torch.float32, device=weight.device)
    size = packing.layout.group_size
    groups = 1 if size is None else inputs // size
    by_module = packing.layout.scales is None
    return {
        "weight": codes.expand(rows, inputs),
        "weight_scale": ones.expand((packing.num_parts,) if by_module else (rows, groups)),
        FLOATS: weight,
    }


class EitherWeight(SmallFloatWeight):
    """A layer in FP8, whose modules may be in floats all the same, which no key of the config says."""

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        floats = {
            f"{FLOATS}@{part}": TensorSpec(
                (size, spec.in_features), None, in_dim=1, required=False, only_part=part
            )
            for part, size in enumerate(spec.out_parts)
        }
        return {**super().create(spec), **floats}

    def kept_bytes(self, spec: LinearSpec) -> int:
        """Of codes and scales."""
        rows, inputs = spec.out_features, spec.in_features
        groups = 1 if self.layout.group_size is None else inputs // self.layout.group_size
        return rows * (inputs + 4 * groups)

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Any:
        tensors = dict(tensors)
        parts = len(spec.out_parts)
        found = [tensors.pop(f"{FLOATS}@{part}", None) for part in range(parts)]
        floats = [tensor for tensor in found if tensor is not None]
        if not floats:
            return super().finish(spec, tensors)
        if len(floats) < parts:
            names = ", ".join(
                name
                for name, tensor in zip(spec.part_names, found, strict=False)
                if tensor is not None
            )
            raise WeightsError(
                f"layer {spec.name!r}: {names} in floats, the other parts in FP8: name those in floats in "
                "quantization_config, modules_to_not_convert"
            )
        return Floats(self.ops.linear.pack(torch.cat(floats)))

    def apply(self, state: PackedLinear | Floats, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if isinstance(state, Floats):
            return self.ops.linear(x, state.weight, bias)
        return super().apply(state, x, bias)

    def apply_gated(
        self,
        ops: OpTable,
        state: PackedLinear | Floats,
        x: Tensor,
        kind: str,
        bias: Tensor | None = None,
    ) -> Tensor:
        if isinstance(state, Floats):
            return ops.linear.gated(x, state.weight, kind, bias)
        return super().apply_gated(ops, state, x, kind, bias)

    def join(self, states: object) -> PackedLinear | None:
        assert isinstance(states, (list, tuple))
        if any(isinstance(state, Floats) for state in states):
            return None
        return super().join(states)


class Floats(NamedTuple):
    """State of a layer in floats."""

    weight: PackedLinear
