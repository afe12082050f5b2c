"""Linear layers over packed integer weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.ops import PackedLinear, QuantizedWeight, Rounding
from headrace_kernels.cpu.library import BAD_VALUES, DTYPES, Library
from headrace_kernels.cpu.memory import packed_buffer
from headrace_kernels.cpu.ops.arguments import (
    CODES,
    bias_for,
    describe,
    dtype_code,
    gate_code,
    gate_width,
    int64,
    matrix,
    pointer,
    routed_rows,
    rows_for,
    weights_for,
)
from headrace_kernels.cpu.ops.packed_weights import (
    MAX_GROUP,
    Layout,
    cut_long_groups,
    layout_for,
    layout_of_rounded,
    widened,
)
from headrace_kernels.cpu.ops.rounding import rounded

_LIMBS: Mapping[str, int] = {"float32": 3, "bfloat16": 2, "float16": 2}
"""Bytes of fixed point that stand for an activation that stays a float; int8 ones have one."""

_FORMS = ("float", "int8")
"""Forms of activations. A CPU multiplies no FP8: see docs/adr/0095."""


@dataclass(frozen=True, slots=True)
class _Packed:
    data: Tensor
    """uint8, begins with its layout: native/src/quant_layout.h."""
    layout: Layout
    limbs: int

    @property
    def family(self) -> tuple[int, ...]:
        """Properties that the weights of one kernel call share."""
        return *self.layout.family, self.limbs


@dataclass(frozen=True, slots=True)
class _Joined:
    """Experts, each packed by itself."""

    addresses: Tensor
    """[E] int64, of their packed data."""
    each: tuple[PackedLinear, ...]


class QuantLinear:
    """See :class:`headrace_core.ops.QuantLinearOp`; ``data`` is a :class:`_Packed`.

    Activations are multiplied in fixed point over their row's largest magnitude: in 8 bits for
    ``activations="int8"``, else in 16 for 16-bit floats (steps of 1/32639 of that magnitude) and
    in 23 for float32. A table of 16 is multiplied as it is where its entries are multiples, up to 127,
    of one number; others (nf4) are rounded to 16 bits, to within 2^-15 of the largest entry, and for
    float32 to 24.

    Raises:
        IndexError: from :meth:`rows`, an id is outside [0, N).
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kernel, self._gated_kernel = library.quant_linear, library.quant_linear_gated
        self._routed_kernel = library.quant_routed

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        _check_forms(dtype, activations)
        weight = cut_long_groups(widened(weight))
        layout = layout_for(weight, dtype)
        values, _, stride = matrix(weight.values)
        parts = [
            None if part is None else part.contiguous()
            for part in (
                weight.scales,
                weight.zero_points if layout.has_zeros else None,
                weight.minimums,
                weight.block_scales,
                weight.block_minimums,
            )
        ]
        packed = self._packed(layout, dtype, activations)
        self._library.quant_linear_pack(
            packed.data.data.data_ptr(),
            layout.address,
            values.data_ptr(),
            *map(pointer, parts),
            stride,
        )
        return packed

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        _check_forms(dtype, activations)
        weight, out_features, stride = matrix(weight)
        in_features = weight.shape[1]
        group = rounding.group_size or max(4, in_features)
        if min(group, in_features) > 2 * MAX_GROUP or (group % 4 and group < in_features):
            return self.pack(rounded(weight, rounding), dtype, activations=activations)
        layout = layout_of_rounded(out_features, in_features, rounding)
        packed = self._packed(layout, dtype, activations)
        status = self._library.quant_linear_round(
            packed.data.data.data_ptr(), layout.address, weight.data_ptr(), stride,
            dtype_code(weight.dtype),
        )  # fmt: skip
        if status == BAD_VALUES:
            raise WeightsError("the weight holds infinities or NaN")
        return packed

    def _packed(self, layout: Layout, dtype: str, activations: str) -> PackedLinear:
        """Memory for a weight of this layout."""
        num_bytes = self._library.quant_linear_packed_bytes(layout.address)
        limbs = 1 if activations == "int8" else _LIMBS[dtype]
        data = _Packed(packed_buffer(num_bytes), layout, limbs)
        return PackedLinear(layout.K, layout.N, dtype, data, num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        x, rows, stride = rows_for("quant_linear", x, packed)
        dtype, out_features = x.dtype, packed.out_features
        bias, bias_pointer = bias_for("quant_linear", bias, packed)
        weight: _Packed = packed.data
        out = torch.empty(rows, out_features, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), weight.data.data_ptr(), bias_pointer, rows, stride,
            weight.limbs, CODES[dtype],
        )  # fmt: skip
        return out

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        x, rows, stride = rows_for("quant_linear", x, packed)
        dtype = x.dtype
        bias, bias_pointer = bias_for("quant_linear", bias, packed)
        weight: _Packed = packed.data
        out = torch.empty(rows, gate_width("quant_linear", packed), dtype=dtype)
        self._gated_kernel(
            out.data_ptr(), x.data_ptr(), weight.data.data_ptr(), bias_pointer, rows, stride,
            weight.limbs, gate_code(kind), CODES[dtype],
        )  # fmt: skip
        return out

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        ids, dtype = int64(ids), getattr(torch, packed.dtype)
        weight: _Packed = packed.data
        out = torch.empty(ids.shape[0], packed.in_features, dtype=dtype)
        status = self._library.quant_linear_rows(
            out.data_ptr(), ids.data_ptr(), weight.data.data_ptr(), ids.shape[0], CODES[dtype]
        )
        if status:
            raise IndexError(f"embedding: an id is outside [0, {packed.out_features})")
        return out

    def join(self, each: Sequence[PackedLinear]) -> PackedLinear | None:
        if len({(p.dtype, p.data.family) for p in each}) > 1:
            return None
        addresses = torch.tensor([p.data.data.data_ptr() for p in each], dtype=torch.int64)
        data = _Joined(addresses, tuple(each))
        return replace(each[0], data=data, num_bytes=sum(p.num_bytes for p in each))

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        joined: _Joined = packed.data
        weight: _Packed = joined.each[0].data
        experts, (rows, top_k) = len(joined.each), ids.shape
        x, share, stride = routed_rows("quant_linear", x, packed, ids)
        by = weights_for("quant_linear", weights, ids)
        if biases is not None:
            shape = (experts, packed.out_features)
            if tuple(biases.shape) != shape or biases.dtype is not x.dtype:
                raise ConfigError(
                    f"quant_linear: biases are {describe(biases)}; they must be {packed.dtype} "
                    f"{list(shape)}"
                )
            biases = biases.contiguous()
        ids = int64(ids)
        wanted = (rows, top_k) if by is None else (rows,)
        out = torch.empty(*wanted, packed.out_features, dtype=x.dtype)
        status = self._routed_kernel(
            out.data_ptr(), x.data_ptr(), joined.addresses.data_ptr(), pointer(biases), pointer(by),
            ids.data_ptr(), rows, top_k, share, experts, stride, weight.limbs, CODES[x.dtype],
        )  # fmt: skip
        if status:
            raise IndexError(f"quant_linear: a routed expert is outside [0, {experts})")
        return out


def _check_forms(dtype: str, activations: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"quant_linear: activations {dtype!r} are not of {list(DTYPES)}")
    if activations not in _FORMS:
        raise ConfigError(
            f"model.quantization_activations = {activations!r}: on a CPU it must be 'auto' or of "
            f"{list(_FORMS)}",
            field="model.quantization_activations",
        )
