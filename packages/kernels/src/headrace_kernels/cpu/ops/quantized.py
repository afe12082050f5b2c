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
from headrace_kernels.cpu.ops.rounding import rounded

_LIMBS: Mapping[str, int] = {"float32": 3, "bfloat16": 2, "float16": 2}
"""Bytes of fixed point that stand for an activation that stays a float; int8 ones have one."""

_MAX_GROUP = 32768
"""Inputs whose products a 32-bit sum holds for certain (255 * 127 * 66311 < 2^31); a longer group
is cut in two of equal scale."""


@dataclass(frozen=True, slots=True)
class _Packed:
    data: Tensor
    """uint8, the layout of native/src/quant_linear.h."""
    group_size: int
    bits: int
    has_zeros: int
    scale_dtype: int
    limbs: int

    @property
    def kind(self) -> tuple[int, ...]:
        """Properties that the weights of one kernel call share."""
        return self.group_size, self.bits, self.has_zeros, self.scale_dtype, self.limbs


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
    in 23 for float32.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._kernel, self._gated_kernel = library.quant_linear, library.quant_linear_gated
        self._routed_kernel = library.quant_routed

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        _check_dtype(dtype)
        weight = _cut_long_groups(weight)
        values, out_features, stride = matrix(weight.values)
        in_features = values.shape[1]
        group = weight.group_size or max(4, in_features)
        if group % 4 and group < in_features:
            raise ConfigError(f"quant_linear: group_size {group} is not a multiple of 4")
        scales, zeros = weight.scales.contiguous(), weight.zero_points
        zeros = None if zeros is None else zeros.contiguous()
        narrow = torch.equal(scales, scales.bfloat16().float())
        scale_dtype = DTYPES["bfloat16" if narrow else "float32"]
        num_bytes = self._library.quant_linear_packed_bytes(
            out_features, in_features, group, weight.bits, zeros is not None, scale_dtype
        )
        data = packed_buffer(num_bytes)
        self._library.quant_linear_pack(
            data.data_ptr(), values.data_ptr(), scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(), out_features, in_features, stride, group,
            weight.bits, scale_dtype,
        )  # fmt: skip
        limbs = 1 if activations == "int8" else _LIMBS[dtype]
        packed = _Packed(data, group, weight.bits, zeros is not None, scale_dtype, limbs)
        return PackedLinear(in_features, out_features, dtype, packed, num_bytes)

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        _check_dtype(dtype)
        weight, out_features, stride = matrix(weight)
        in_features, bits = weight.shape[1], rounding.bits
        group = rounding.group_size or max(4, in_features)
        if min(group, in_features) > 2 * _MAX_GROUP or (group % 4 and group < in_features):
            return self.pack(rounded(weight, rounding), dtype, activations=activations)
        scale_dtype = DTYPES["float32" if rounding.group_size is None else "bfloat16"]
        num_bytes = self._library.quant_linear_packed_bytes(
            out_features, in_features, group, bits, 0, scale_dtype
        )
        data = packed_buffer(num_bytes)
        status = self._library.quant_linear_round(
            data.data_ptr(), weight.data_ptr(), out_features, in_features, stride, group, bits,
            scale_dtype, dtype_code(weight.dtype),
        )  # fmt: skip
        if status == BAD_VALUES:
            raise WeightsError("the weight holds infinities or NaN")
        limbs = 1 if activations == "int8" else _LIMBS[dtype]
        packed = _Packed(data, group, bits, 0, scale_dtype, limbs)
        return PackedLinear(in_features, out_features, dtype, packed, num_bytes)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        x, rows, stride = rows_for("quant_linear", x, packed)
        dtype, out_features = x.dtype, packed.out_features
        bias, bias_pointer = bias_for("quant_linear", bias, packed)
        weight: _Packed = packed.data
        out = torch.empty(rows, out_features, dtype=dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), weight.data.data_ptr(), bias_pointer, rows, out_features,
            packed.in_features, stride, weight.group_size, weight.bits, weight.has_zeros,
            weight.scale_dtype, weight.limbs, CODES[dtype],
        )  # fmt: skip
        return out

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        x, rows, stride = rows_for("quant_linear", x, packed)
        dtype, out_features = x.dtype, packed.out_features
        bias, bias_pointer = bias_for("quant_linear", bias, packed)
        weight: _Packed = packed.data
        out = torch.empty(rows, gate_width("quant_linear", packed), dtype=dtype)
        self._gated_kernel(
            out.data_ptr(), x.data_ptr(), weight.data.data_ptr(), bias_pointer, rows, out_features,
            packed.in_features, stride, weight.group_size, weight.bits, weight.has_zeros,
            weight.scale_dtype, weight.limbs, gate_code(kind), CODES[dtype],
        )  # fmt: skip
        return out

    def join(self, each: Sequence[PackedLinear]) -> PackedLinear | None:
        kinds = {(p.in_features, p.out_features, p.dtype, p.data.kind) for p in each}
        if len(kinds) > 1:
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
            ids.data_ptr(), rows, top_k, share, experts, packed.out_features, packed.in_features,
            stride, weight.group_size, weight.bits, weight.has_zeros, weight.scale_dtype,
            weight.limbs, CODES[x.dtype],
        )  # fmt: skip
        if status:
            raise IndexError(f"quant_linear: a routed expert is outside [0, {experts})")
        return out


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"quant_linear: activations {dtype!r} are not of {list(DTYPES)}")


def _cut_long_groups(weight: QuantizedWeight) -> QuantizedWeight:
    in_features = weight.values.shape[1]
    group = weight.group_size or in_features
    if min(group, in_features) <= 2 * _MAX_GROUP:
        return weight
    if weight.group_size is not None and group % _MAX_GROUP:
        raise ConfigError(
            f"quant_linear: group_size {group} is over {2 * _MAX_GROUP} and no multiple of "
            f"{_MAX_GROUP}"
        )
    count = -(-in_features // _MAX_GROUP)

    def spread(x: Tensor) -> Tensor:
        times = -(-min(group, in_features) // _MAX_GROUP)
        return x.repeat_interleave(times, dim=1)[:, :count]

    zeros = weight.zero_points
    return QuantizedWeight(
        weight.values,
        spread(weight.scales),
        None if zeros is None else spread(zeros),
        bits=weight.bits,
        group_size=_MAX_GROUP,
    )
