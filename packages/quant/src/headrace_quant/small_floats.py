"""Linear layers in 4-bit floats (E2M1) that stay packed: MXFP4 and NVFP4, in every published layout.

Sources: OCP Microscaling Formats (MX) specification 1.0 (E2M1, E8M0); NVIDIA 2025, arXiv:2509.25149 (NVFP4:
an E4M3 scale for 16 inputs, and one float32 for all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.code_books import E2M1, e8m0_scales, nibble_codes, table
from headrace_quant.int_linear_methods import IntegerMethod, checked_scales

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp4Layout:
    """Tensors of a layer of N outputs and K inputs, and what they mean.

    Codes are uint8 [N, K / 2], a byte's lower half first.
    """

    codes: str = "weight_packed"
    scales: str = "weight_scale"
    """[N, K / g]: uint8 (E8M0, exponents of 2 plus 127) or, with :attr:`outer`, float8_e4m3fn."""
    group_size: int = 32
    outer: str | None = None
    """Name of a scale float32 [1] of the whole module."""
    outer_divides: bool = False
    """The outer scale divides, and does not multiply."""
    in_blocks: bool = False
    """Codes have shape [N, K / g, g / 2]."""


MXFP4 = Fp4Layout()


class Fp4Weight(IntegerMethod):
    """A layer in E2M1; activations are floats, whatever the checkpoint says of them."""

    takes_views = True

    def __init__(self, ops: OpTable, layout: Fp4Layout) -> None:
        super().__init__(ops, activations="float")
        self.layout = layout

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        layout, rows, inputs = self.layout, spec.out_features, spec.in_features
        size = layout.group_size
        if inputs % size:
            raise ConfigError(
                f"layer {spec.name!r}: in_features = {inputs} is not a multiple of the {size} inputs that "
                "share a scale; fewer ranks (tensor_parallel_size) may help"
            )
        groups = inputs // size
        shape = (rows, groups, size // 2) if layout.in_blocks else (rows, inputs // 2)
        of_scales = "uint8" if layout.outer is None else "float8_e4m3fn"
        wanted = {
            layout.codes: TensorSpec(shape, "uint8", in_dim=1),
            layout.scales: TensorSpec((rows, groups), of_scales, in_dim=1),
        }
        if layout.outer is not None:
            wanted[layout.outer] = outer_spec(spec)
        return wanted

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        layout, scales = self.layout, tensors[self.layout.scales]
        codes = tensors[layout.codes]
        outer = None
        if layout.outer is not None:
            outer = outer_scales(spec, layout.outer, tensors, divides=layout.outer_divides)
        weight = QuantizedWeight(
            nibble_codes(codes.flatten(1)),
            e8m0_scales(spec.name, scales)
            if outer is None
            else checked_scales(spec, scales.float()),
            bits=4,
            group_size=layout.group_size,
            table=table(E2M1, codes),
            block_scales=outer,
        )
        return self.pack(spec, weight)


def outer_spec(spec: LinearSpec) -> TensorSpec:
    """A scale [1] of each fused module."""
    return TensorSpec((max(1, len(spec.out_parts)),), "float32", by_part=True, any_float=True)


def outer_scales(
    spec: LinearSpec, name: str, tensors: Mapping[str, Tensor], *, divides: bool = False
) -> Tensor:
    """The scales [parts] of fused modules as one of each row [N, 1] float32.

    Raises:
        WeightsError: one is no positive number; names the layer.
    """
    scales = tensors[name].float()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise WeightsError(
            f"layer {spec.name!r}: {name} = {scales.tolist()}: must be positive numbers"
        )
    sizes = torch.tensor(spec.out_parts, device=scales.device)
    return (1 / scales if divides else scales).repeat_interleave(sizes)[:, None].contiguous()
