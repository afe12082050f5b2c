"""Linear layers in floats of 4, 6 or 8 bits that stay packed: MXFP4, MXFP6, MXFP8, NVFP4 and FP8.

Floats of 6 bits are codes with a table of 64, which kernels hold in 6 bits, or in 8 as E4M3.

Sources: OCP Microscaling Formats (MX) specification 1.0 (the elements and E8M0); NVIDIA 2025,
arXiv:2509.25149 (NVFP4: an E4M3 scale for 16 inputs, and one float32 for all); Micikevicius et al. 2022,
arXiv:2209.05433 (FP8).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from headrace_core.errors import WeightsError
from headrace_core.linear import LinearSpec, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.bits import unpack_octets
from headrace_quant.code_books import (
    E2M1,
    E2M3,
    E3M2,
    e8m0_scales,
    float8_table,
    nibble_codes,
    octet_codes,
    table,
)
from headrace_quant.config_checks import uneven_inputs
from headrace_quant.int_linear_methods import IntegerMethod, checked_scales

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from headrace_core.ops import QuantLinearOp

_BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8}
_SIX_BITS = {"e2m3": E2M3, "e3m2": E3M2}


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """Tensors of a layer of N outputs and K inputs, and what they mean.

    Codes are uint8 [N, K * bits / 8], the first of a byte or of three bytes in the lowest bits; of E4M3
    float8_e4m3fn [N, K].
    """

    element: str = "e2m1"
    """``e2m1``, ``e2m3``, ``e3m2`` or ``e4m3``."""
    codes: str = "weight_packed"
    scales: str | None = "weight_scale"
    """[N, groups], or [N, 1] without groups; None: there is the outer one only."""
    scale_kind: str = "e8m0"
    """``e8m0``: uint8, exponents of 2 plus 127; ``e4m3``: float8_e4m3fn; ``float``."""
    group_size: int | None = 32
    """Inputs that share a scale; None: all."""
    outer: str | None = None
    """Name of a scale float32 [1] of the whole module."""
    outer_divides: bool = False
    """The outer scale divides, and does not multiply."""
    in_blocks: bool = False
    """Codes have shape [N, K / 32, 16]."""


class SmallFloatWeight(IntegerMethod):
    """A layer in small floats.

    Args:
        activations: ``float``, whatever the checkpoint says of them, or ``fp8`` with E4M3.
    """

    takes_views = True

    def __init__(self, ops: OpTable, layout: FloatLayout, *, activations: str = "float") -> None:
        super().__init__(ops, activations=activations)
        self.layout = layout

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        layout, rows, inputs = self.layout, spec.out_features, spec.in_features
        bits = _BITS[layout.element]
        size = layout.group_size or inputs
        if inputs % size or inputs * bits % 8:
            raise uneven_inputs(spec, layout.codes, size, "inputs that share a scale")
        groups = inputs // size
        octets = inputs * bits // 8
        shape = (rows, groups, octets // groups) if layout.in_blocks else (rows, octets)
        of_codes = "float8_e4m3fn" if bits == 8 else "uint8"
        wanted = {layout.codes: TensorSpec(shape, of_codes, in_dim=1)}
        if layout.scales is not None:
            in_dim = None if layout.group_size is None else 1
            kind = {"e8m0": "uint8", "e4m3": "float8_e4m3fn"}.get(layout.scale_kind, "float32")
            wanted[layout.scales] = TensorSpec(
                (rows, groups), kind, in_dim=in_dim, any_float=kind == "float32"
            )
        if layout.outer is not None:
            wanted[layout.outer] = TensorSpec(
                (max(1, len(spec.out_parts)),), "float32", by_part=True, any_float=True
            )
        return wanted

    def kept_bytes(self, spec: LinearSpec) -> int | None:
        """Of 6 bits what the kernels hold of a small weight, which may be 8."""
        if self.layout.element not in _SIX_BITS:
            return None
        held = _six_bits_held(cast("Hashable", self.ops.quant_linear), spec.dtype)
        return round(spec.out_features * spec.in_features * held / 8)

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        layout, stored = self.layout, tensors[self.layout.codes]
        codes, book = _codes(spec, layout.element, stored)
        outer, scales = None, None
        if layout.outer is not None:
            outer = _outer_scales(spec, layout, tensors[layout.outer])
        if layout.scales is not None:
            found = tensors[layout.scales]
            scales = (
                e8m0_scales(spec.name, found)
                if layout.scale_kind == "e8m0"
                else checked_scales(spec, found.float()).clone()
            )
        elif outer is not None:
            scales, outer = outer, None
        assert scales is not None
        weight = QuantizedWeight(
            codes,
            scales,
            bits=_BITS[layout.element],
            group_size=layout.group_size,
            table=book,
            block_scales=outer,
        )
        return self.pack(spec, weight)


@functools.lru_cache(maxsize=8)
def _six_bits_held(linear: Hashable, dtype: str) -> float:
    """Bits in memory of a weight of MXFP6, its scale included."""

    def packed_bytes(rows: int) -> int:
        scales = 2.0 ** torch.arange(-4.0, inputs // 32 - 4).expand(rows, -1)
        codes = torch.zeros(rows, inputs, dtype=torch.int8)
        weight = QuantizedWeight(codes, scales, bits=6, group_size=32, table=table(E2M3, scales))
        pack = cast("QuantLinearOp", linear).pack
        return pack(weight, dtype, activations="float").num_bytes

    rows, inputs = 64, 256
    more = packed_bytes(2 * rows) - packed_bytes(rows)  # without what a weight of any size has
    return 8 * more / (rows * inputs)


def _codes(spec: LinearSpec, element: str, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] int8, less half of their number, and their table.

    Raises:
        WeightsError: a code of E4M3 is no number; names the layer.
    """
    stored = stored.flatten(1)
    if element == "e2m1":
        return nibble_codes(stored), table(E2M1, stored)
    if element in _SIX_BITS:
        codes = unpack_octets(stored, _BITS[element]).view(torch.int8) - 32
        return codes, table(_SIX_BITS[element], stored)
    octets = stored.contiguous().view(torch.uint8)
    if octets.numel() and int((octets & 127).amax()) == 127:
        raise WeightsError(f"layer {spec.name!r}: the weight (E4M3) has NaN")
    return octet_codes(octets), float8_table(torch.float8_e4m3fn, stored)


def _outer_scales(spec: LinearSpec, layout: FloatLayout, scales: Tensor) -> Tensor:
    """The scales [parts] of fused modules as one of each row [N, 1] float32.

    Raises:
        WeightsError: one is no positive number; names the layer.
    """
    scales = scales.float()
    is_scale = scales.isfinite() & (scales > 0 if layout.outer_divides else scales >= 0)
    if not bool(is_scale.all()):
        raise WeightsError(
            f"layer {spec.name!r}: {layout.outer} = {scales.tolist()}: must be positive numbers"
        )
    sizes = torch.tensor(spec.out_parts, device=scales.device)
    if layout.outer_divides:
        scales = 1 / scales
    return scales.repeat_interleave(sizes)[:, None].contiguous()
