"""Linear layers of stored integers: a byte each, or packed in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace_core.linear import LinearSpec, TensorSpec
from headrace_core.ops import OpTable, PackedLinear, QuantizedWeight
from headrace_quant.bits import held_bits, unpack_rows, words_for
from headrace_quant.config_checks import uneven_inputs, uneven_outputs
from headrace_quant.int_linear_methods import IntegerMethod, checked_scales, scale_spec
from headrace_quant.sorted_inputs import Sorted, SortedMethod, sorted_order

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ByteFormat:
    """Format of a layer with an integer in each byte."""

    bits: int = 8
    group_size: int | None = None
    """None: one scale per output, or one of the module."""
    of_module: bool = False
    """Each fused module has one scale."""
    has_zeros: bool = False
    codes: str = "weight"
    scales: str = "weight_scale"
    zeros: str = "weight_zero_point"


class StoredInt8(IntegerMethod):
    """``weight`` int8 [N, K], ``weight_scale`` [N, groups] and, if the codes have zero points,
    ``weight_zero_point`` int8 [N, groups]; of scales of a module there is one, [1].

    Integers beyond the bits that the config says are held in 8.
    """

    def __init__(self, ops: OpTable, form: ByteFormat = ByteFormat(), *, activations: str) -> None:
        super().__init__(ops, activations=activations)
        self.form = form

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        rows, inputs, size = spec.out_features, spec.in_features, self.form.group_size
        if size is not None:
            _check_groups(spec, self.form.codes, size)
        groups = 1 if size is None else inputs // size
        scales = scale_spec((rows, groups), None if size is None else 1)
        if self.form.of_module:
            scales = replace(scales, shape=(max(1, len(spec.out_parts)),), by_part=True)
        codes = TensorSpec((rows, inputs), "int8", in_dim=1)
        wanted = {self.form.codes: codes, self.form.scales: scales}
        if self.form.has_zeros:
            wanted[self.form.zeros] = replace(scales, dtype="int8", any_float=False)
        return wanted

    def kept_bytes(self, spec: LinearSpec) -> int | None:
        form = self.form
        if form.bits == 8 and form.group_size is None:
            return None  # as in the file
        return _kept_bytes(spec, form.bits, form.group_size, has_zeros=form.has_zeros)

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        form = self.form
        values, zeros = tensors[form.codes], tensors.get(form.zeros)
        bits, half = form.bits, 1 << (form.bits - 1)
        for found in (values, zeros):
            if found is not None and bool(((found < -half) | (found >= half)).any()):
                bits = 8
        weight = QuantizedWeight(
            values,
            checked_scales(spec, self._by_row(spec, tensors[form.scales])),
            None if zeros is None else self._by_row(spec, zeros).contiguous(),
            bits=bits,
            group_size=form.group_size,
        )
        return self.pack(spec, weight)

    def _by_row(self, spec: LinearSpec, found: Tensor) -> Tensor:
        if not self.form.of_module:
            return found
        return found.repeat_interleave(torch.tensor(spec.out_parts, device=found.device))[:, None]


@dataclass(frozen=True, slots=True)
class WordFormat:
    """Format of a ``pack-quantized`` layer."""

    bits: int
    group_size: int | None
    """None: one scale per output."""
    has_zeros: bool
    by_importance: bool = False
    """``weight_g_idx`` says to which group an input belongs."""


class PackedWords(SortedMethod):
    """``weight_packed`` int32 [N, K * bits / 32], ``weight_scale`` [N, groups] and, if the codes
    have zero points, ``weight_zero_point`` int32 [N * bits / 32, groups]; with ``actorder: group``
    ``weight_g_idx`` int32 [K], the group of each input.

    Codes are value + 2^(bits - 1), in runs (:mod:`headrace_quant.bits`); weights are packed along the
    inputs, zero points along the outputs. Served where words end with rows, parts and groups.
    """

    def __init__(self, ops: OpTable, form: WordFormat, *, activations: str) -> None:
        super().__init__(ops, activations=activations)
        self.form = form

    @property
    def needs_whole(self) -> bool:  # type: ignore[override]
        """A rank's inputs belong to any groups where they were sorted by importance."""
        return self.form.by_importance

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        size = self.form.group_size
        bits = self.form.bits
        words = words_for(spec.in_features, bits)
        if words < 0:
            raise uneven_inputs(spec, "weight_packed", *_in_words(bits))
        if size is not None:
            _check_groups(spec, "weight_packed", size)
        groups = 1 if size is None else spec.in_features // size
        in_dim = None if size is None else 1
        wanted = {
            "weight_packed": TensorSpec((spec.out_features, words), "int32", in_dim=1),
            "weight_scale": scale_spec((spec.out_features, groups), in_dim),
        }
        if self.form.has_zeros:
            rows = sum(_check_outputs(spec, part, bits) for part in spec.out_parts)
            wanted["weight_zero_point"] = TensorSpec((rows, groups), "int32", in_dim=in_dim)
        if self.form.by_importance:
            wanted["weight_g_idx"] = TensorSpec((spec.in_features,), "int32", part_dim=None)
        return wanted

    def kept_bytes(self, spec: LinearSpec) -> int:
        form = self.form
        return _kept_bytes(spec, held_bits(form.bits), form.group_size, has_zeros=form.has_zeros)

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear | Sorted:
        bits, size, zeros = self.form.bits, self.form.group_size, None
        if self.form.has_zeros:
            zeros = _signed(unpack_rows(tensors["weight_zero_point"].T, bits), bits).T.contiguous()
        values, order = _signed(unpack_rows(tensors["weight_packed"], bits), bits), None
        groups = tensors.get("weight_g_idx")
        if groups is not None and size is not None and int(groups.min()) >= 0:  # -1: it was not set
            order = sorted_order(spec, groups, size, "weight_g_idx")
        if order is not None:
            values = values[:, order]
        weight = QuantizedWeight(
            values,
            checked_scales(spec, tensors["weight_scale"]),
            zeros,
            bits=held_bits(bits),
            group_size=size,
        )
        packed = self.pack(spec, weight)
        return packed if order is None else Sorted(order, packed)


def _kept_bytes(spec: LinearSpec, bits: int, group_size: int | None, *, has_zeros: bool) -> int:
    """Bytes of packed integers, with scales of groups in 16 bits, in which files have them and which kernels
    keep, or of outputs in 32; and a byte for each zero point."""
    rows, inputs = spec.out_features, spec.in_features
    groups, scale = (1, 4) if group_size is None else (inputs // group_size, 2)
    return rows * inputs * bits // 8 + rows * groups * (scale + has_zeros)


def _signed(values: Tensor, bits: int) -> Tensor:
    """uint8 within [0, 2 ** bits) -> int8, less half of that."""
    return (values.short() - (1 << (bits - 1))).to(torch.int8)


def _check_groups(spec: LinearSpec, tensor: str, size: int) -> None:
    if spec.in_features % size:
        raise uneven_inputs(spec, tensor, size, "group_size")


def _check_outputs(spec: LinearSpec, part: int, bits: int) -> int:
    """Words that the zero points of so many outputs fill."""
    words = words_for(part, bits)
    if words < 0:
        raise uneven_outputs(spec, "weight_zero_point", *_in_words(bits))
    return words


def _in_words(bits: int) -> tuple[int, str]:
    """Least number of values that fill words of 32 bits, and what they do."""
    return 32 // math.gcd(32, bits), f"words of 32 bits, values of {bits}"
