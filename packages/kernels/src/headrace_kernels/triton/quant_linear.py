"""Linear layers over packed weights: host side; kernels in :mod:`headrace_kernels.triton.quant_kernels`.

Which kernel multiplies, and in what shapes, follows from the weight and from the number of rows, by the
tables of :mod:`headrace_kernels.triton.quant_tiles`. With ``batch_invariant`` the number of rows has no part
in it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.ops import QUANT_ACTIVATIONS, PackedLinear, QuantizedWeight, Rounding
from headrace_kernels.cpu.ops.rounding import rounded
from headrace_kernels.triton import quant_kernels as kernels
from headrace_kernels.triton.activations import activation_and_mul, check_gate
from headrace_kernels.triton.launch import dense, padded
from headrace_kernels.triton.moe import _sum_places, sort_entries
from headrace_kernels.triton.quant_layout import (
    QuantLayout,
    QuantTensors,
    lay_out,
    made_alike,
)
from headrace_kernels.triton.quant_tiles import INTERPRETED, QuantTile, rows_class, tile_for

_DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
_ROW_BLOCK = 1024
_scaled_mm = torch._scaled_mm
"""x [T, K] float8 by rows, weight [K, N] float8 by columns, scales [T, 1] and [1, N] float32."""


@dataclass(frozen=True, slots=True)
class _Packed:
    layout: QuantLayout
    tensors: QuantTensors


@dataclass(frozen=True, slots=True)
class _Joined:
    """Experts, each packed by itself."""

    layout: QuantLayout
    addresses: Tensor
    """[E, 9] int64, of their tensors."""
    each: tuple[QuantTensors, ...]


class QuantLinear:
    """See :class:`headrace_core.ops.QuantLinearOp`; ``data`` is a :class:`_Packed`.

    Args:
        batch_invariant: one kernel and one shape of tiles for all batches.
        tile: shape of all programs, instead of the tables'.
    """

    def __init__(self, *, batch_invariant: bool = False, tile: QuantTile | None = None) -> None:
        self.batch_invariant = batch_invariant
        self.tile = tile

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        if dtype not in _DTYPES or activations not in QUANT_ACTIVATIONS:
            raise ConfigError(
                f"quant_linear: dtype {dtype!r}, activations {activations!r}: must be of "
                f"{list(_DTYPES)} and {list(QUANT_ACTIVATIONS)}"
            )
        if activations == "fp8":
            _check_float8_units(weight.values.device)
        layout, tensors = lay_out(weight, activations=activations)
        out_features, in_features = weight.values.shape
        data = _Packed(layout, tensors)
        return PackedLinear(in_features, out_features, dtype, data, tensors.num_bytes)

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        integers = rounded(weight, rounding)
        if not bool(integers.scales.isfinite().all()):
            raise WeightsError("the weight holds infinities or NaN")
        integers = replace(
            integers,
            values=integers.values.to(weight.device),
            scales=integers.scales.to(weight.device),
        )
        return self.pack(integers, dtype, activations=activations)

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return self._product(x, packed, bias, None)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        check_gate(kind)
        return self._product(x, packed, bias, kind)

    def _product(
        self, x: Tensor, packed: PackedLinear, bias: Tensor | None, kind: str | None
    ) -> Tensor:
        """``kind``: of the gate; it is applied as sums are finished, or after that if they come
        finished."""
        _check(x, packed)
        layout, tensors = packed.data.layout, packed.data.tensors
        rows, outputs, inputs = x.shape[0], packed.out_features, packed.in_features
        gated = _Gated(outputs, kind)
        if not rows:
            return torch.empty((0, gated.size), dtype=x.dtype, device=x.device)
        steps = None
        x, dtype = dense(x), x.dtype
        if layout.rounds_rows:
            x, steps = _round_rows(x, layout.activations)
        if steps is not None and not self.batch_invariant:
            whole = _torch_product(x, steps, packed, bias, gated)
            if whole is not None:
                return whole
        rows_kind, tile = self._tile(rows, layout)
        splits, per_split = _splits(inputs, outputs, layout, tile)
        columns = triton.cdiv(outputs, tile.block_n)
        sizes = (outputs, inputs, triton.cdiv(inputs, layout.step), per_split)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        few = rows_kind == "few"
        parts = None
        if few or splits > 1:
            sums = torch.int32 if layout.integer and not layout.grouped else torch.float32
            parts = torch.empty((splits, rows, outputs), dtype=sums, device=x.device)
        if few:
            t = tensors
            kernels._quant_few_rows_kernel[(columns, splits)](
                parts, x, t.codes, t.high, t.scales, t.zeros, t.minimums, t.block_scales,
                t.block_minimums, t.table, x.stride(0), rows, *sizes,
                **_constants(layout, _FEW_ROWS), BLOCK_M=padded(rows), BLOCK_N=tile.block_n, **options,
            )  # fmt: skip
        else:
            out = parts
            if out is None:
                out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
            kernels._quant_dot_kernel[(triton.cdiv(rows, tile.block_m), columns, splits)](
                out, x, steps, bias, *tensors.each(), None, None, None, x.stride(0), rows, 1, *sizes,
                PER_ROW=1, ROUTED=False, SPLIT=parts is not None, HAS_BIAS=bias is not None,
                **_constants(layout, _DOT), COMPUTE=_compute(layout, dtype), BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n, **options,
            )  # fmt: skip
            if parts is None:
                return out if kind is None else activation_and_mul(out, kind)
        assert parts is not None
        return _finish(parts, dtype, steps, bias, tensors, gated)

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        layout, t, inputs = packed.data.layout, packed.data.tensors, packed.in_features
        out = torch.empty(
            (ids.shape[0], inputs), dtype=getattr(torch, packed.dtype), device=ids.device
        )
        if out.numel():
            block = min(_ROW_BLOCK, padded(inputs))
            kernels._quant_weight_rows_kernel[(ids.shape[0], triton.cdiv(inputs, block))](
                out, ids.contiguous(), t.codes, t.high, t.scales, t.zeros, t.minimums,
                t.block_scales, t.block_minimums, t.row_scales, t.table, packed.out_features, inputs,
                **_constants(layout, _WEIGHT_ROWS), BLOCK_K=block,
            )  # fmt: skip
        return out

    def join(self, each: Sequence[PackedLinear]) -> PackedLinear | None:
        """As the protocol says, but scales whose types differ are copied into one type."""
        first = each[0]
        if len({(p.in_features, p.out_features, p.dtype) for p in each}) > 1:
            return None
        alike = made_alike([(p.data.layout, p.data.tensors) for p in each])
        if alike is None:
            return None
        tensors = tuple(parts for _, parts in alike)
        addresses = torch.tensor(
            [[0 if x is None else x.data_ptr() for x in parts.each()] for parts in tensors],
            dtype=torch.int64,
            device=tensors[0].codes.device,
        )
        data = _Joined(alike[0][0], addresses, tensors)
        return replace(first, data=data, num_bytes=sum(parts.num_bytes for parts in tensors))

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        joined: _Joined = packed.data
        layout, (rows, top_k), outputs = joined.layout, ids.shape, packed.out_features
        shared, experts, entries = x.dim() == 2, len(joined.each), rows * top_k
        x = dense(x) if shared else x.reshape(entries, x.shape[-1])
        _check(x, packed)
        if biases is not None and tuple(biases.shape) != (experts, outputs):
            raise ConfigError(
                f"quant_linear: biases are {list(biases.shape)}; they must be [{experts}, {outputs}]"
            )
        dtype = x.dtype
        lines = torch.empty(
            (entries, outputs), dtype=dtype if weights is None else torch.float32, device=x.device
        )
        if entries:
            steps = None
            if layout.rounds_rows:
                x, steps = _round_rows(x, layout.activations)
            # As many rows a block as an expert has on average.
            _, tile = self._tile(max(5, entries // experts), layout)
            where = sort_entries(ids, experts, tile.block_m)
            grid = (where.experts.shape[0], triton.cdiv(outputs, tile.block_n), 1)
            count = triton.cdiv(packed.in_features, layout.step)
            kernels._quant_dot_kernel[grid](
                lines, x, steps, None if biases is None else biases.contiguous(),
                *joined.each[0].each(), joined.addresses, where.entries, where.experts, x.stride(0),
                entries, experts, outputs, packed.in_features, count, count,
                PER_ROW=top_k if shared else 1, ROUTED=True, SPLIT=False, HAS_BIAS=biases is not None,
                **_constants(layout, _DOT), COMPUTE=_compute(layout, dtype), BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n, num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
        if weights is None:
            return lines.view(rows, top_k, outputs)
        return _sum_places(lines, weights, dtype)

    def _tile(self, rows: int, layout: QuantLayout) -> tuple[str, QuantTile]:
        """Class of rows, and shape of its programs."""
        kind = "some" if self.batch_invariant else rows_class(rows)
        if self.tile is not None:
            tile = self.tile
        elif _interpreting():
            tile = INTERPRETED[kind]
        else:
            tile = tile_for(kind, layout.bits)
        # Parts would be summed otherwise than in `routed`, which has none.
        return kind, replace(tile, programs=0) if self.batch_invariant else tile


_WEIGHT_ROWS = (
    "bits", "tile", "table", "float8", "grouped", "has_zeros", "has_minimums", "has_pairs",
    "has_block_scales", "has_block_minimums", "has_row_scales",
)  # fmt: skip
_FEW_ROWS = (*_WEIGHT_ROWS[:-1], "integer", "per_input")
_DOT = (*_WEIGHT_ROWS, "integer", "per_input", "rounds_rows", "whole_step")
"""Properties of a layout that each kernel is compiled for, beside sizes."""


def _constants(layout: QuantLayout, names: Sequence[str]) -> dict[str, Any]:
    constants = {name.upper(): getattr(layout, name) for name in names}
    return constants | {"GROUP": layout.group_size, "BLOCK": layout.block_size}


def _compute(layout: QuantLayout, dtype: torch.dtype) -> Any:
    """Type in which floats are multiplied."""
    if layout.per_input or (dtype is torch.bfloat16 and _interpreting()):  # see launch.widen
        return tl.float32
    return _DTYPES[str(dtype).removeprefix("torch.")]


def _splits(inputs: int, outputs: int, layout: QuantLayout, tile: QuantTile) -> tuple[int, int]:
    """Parts of the inputs, and steps of each."""
    steps = triton.cdiv(inputs, layout.step)
    wanted = tile.programs // triton.cdiv(max(1, outputs), tile.block_n)
    per_split = triton.cdiv(steps, max(1, min(wanted, steps)))
    return (triton.cdiv(steps, per_split) if steps else 1), per_split


def _round_rows(x: Tensor, activations: str = "int8") -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes int8 or float8_e4m3fn [T, K and up to 15 more], steps [T] float32."""
    rows, inputs = x.shape
    codes = torch.empty((rows, -(-inputs // 16) * 16), dtype=torch.int8, device=x.device)
    steps = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(_ROW_BLOCK, padded(inputs))
    if activations == "int8":
        kernels._quant_round_kernel[(rows,)](
            x, codes, steps, x.stride(0), codes.stride(0), inputs, BLOCK=block
        )
        return codes, steps
    octets = codes.view(torch.uint8)
    kernels._quant_round_float8_kernel[(rows,)](
        x, octets, steps, x.stride(0), octets.stride(0), inputs, BLOCK=block
    )
    return octets.view(torch.float8_e4m3fn), steps


class _Gated(NamedTuple):
    """Outputs of a product, of which the first half may gate the second."""

    outputs: int
    kind: str | None

    @property
    def size(self) -> int:
        return self.outputs if self.kind is None else self.outputs // 2


def _finish(
    parts: Tensor,
    dtype: torch.dtype,
    steps: Tensor | None,
    bias: Tensor | None,
    tensors: QuantTensors,
    gated: _Gated,
) -> Tensor:
    """parts [splits, T, N] -> [T, N or its half]"""
    splits, rows, outputs = parts.shape
    out = torch.empty((rows, gated.size), dtype=dtype, device=parts.device)
    block = min(_ROW_BLOCK, padded(gated.size))
    kernels._quant_finish_kernel[(rows, triton.cdiv(gated.size, block))](
        out, parts, steps, tensors.row_scales, bias, rows, outputs, gated.size, splits,
        GATED=gated.kind is not None, KIND=gated.kind or "",
        HAS_ROW_SCALES=tensors.row_scales is not None, ROUNDS_ROWS=steps is not None,
        HAS_BIAS=bias is not None, BLOCK_N=block,
    )  # fmt: skip
    return out


def _torch_product(
    x: Tensor, steps: Tensor, packed: PackedLinear, bias: Tensor | None, gated: _Gated
) -> Tensor | None:
    """The product of rounded rows by torch's library; None: it does not multiply these."""
    layout, tensors = packed.data.layout, packed.data.tensors
    inputs, dtype = packed.in_features, getattr(torch, packed.dtype)
    if _multiplies_integers(x, layout, gated.outputs):
        sums = torch._int_mm(x[:, :inputs], tensors.codes[:inputs].view(torch.int8))
        return _finish(sums[None], dtype, steps, bias, tensors, gated)
    if not _multiplies_float8(x, layout, inputs, gated.outputs, dtype):
        return None
    weight = tensors.codes.view(torch.float8_e4m3fn)[:, :inputs].T
    whole = _scaled_mm(
        x, weight, steps[:, None], tensors.row_scales[None, :], bias=bias, out_dtype=dtype
    )
    return whole if gated.kind is None else activation_and_mul(whole, gated.kind)


def _multiplies_integers(x: Tensor, layout: QuantLayout, outputs: int) -> bool:
    """True if cuBLAS multiplies these integers; ``torch._int_mm`` takes 17 rows or more, and sizes that 8
    divides. Its sums are exact, so the rows do not depend on each other."""
    return (
        x.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) >= (7, 5)
        and int_mm_takes(layout, x.shape[0], x.shape[1], outputs)
    )


def int_mm_takes(layout: QuantLayout, rows: int, inputs: int, outputs: int) -> bool:
    """True if ``torch._int_mm`` multiplies such a weight by so many rows."""
    plain = layout.integer and layout.bits == 8 and layout.table == "none"
    plain = plain and not layout.grouped and not layout.has_zeros
    return plain and rows > 16 and inputs % 8 == 0 and outputs % 8 == 0


def _check_float8_units(device: torch.device) -> None:
    """Raises: ConfigError: a GPU that multiplies no FP8; the interpreter does."""
    if device.type == "cuda" and not _has_float8_units(device):
        raise ConfigError(
            f"model.quantization_activations = 'fp8': {torch.cuda.get_device_name(device)} multiplies no "
            "FP8; it takes an NVIDIA GPU of capability 8.9 or more; 'float' and 'int8' are served here",
            field="model.quantization_activations",
        )


def _has_float8_units(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)


def _multiplies_float8(
    x: Tensor, layout: QuantLayout, inputs: int, outputs: int, dtype: torch.dtype
) -> bool:
    """True if ``torch._scaled_mm`` multiplies these numbers; its result is in bfloat16 where scales are those
    of rows."""
    return (
        x.is_cuda
        and scaled_mm_takes(layout, x.shape[0], inputs, outputs, dtype)
        and _has_float8_units(x.device)
        and _scaled_mm_works(x.device)
    )


def scaled_mm_takes(
    layout: QuantLayout, rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> bool:
    """True if ``torch._scaled_mm`` multiplies such a weight by so many rows. With 16 rows or fewer the
    kernels here read the weight as fast."""
    plain = layout.float8 and not layout.grouped and layout.has_row_scales
    fits = inputs > 0 and inputs % 16 == 0 and outputs % 16 == 0
    return plain and fits and rows > 16 and dtype is torch.bfloat16


@functools.cache
def _scaled_mm_works(device: torch.device) -> bool:
    """True if this build of torch has the product with scales of rows for this GPU."""
    ones = torch.ones((32, 32), device=device).to(torch.float8_e4m3fn)
    scales = torch.ones((32, 1), device=device)
    try:
        _scaled_mm(ones, ones.T, scales, scales.T.contiguous(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def _check(x: Tensor, packed: PackedLinear) -> None:
    dtype = str(x.dtype).removeprefix("torch.")
    if x.dim() != 2 or x.shape[1] != packed.in_features or dtype != packed.dtype:
        raise ConfigError(
            f"quant_linear: x is {dtype} {list(x.shape)}, packed for {packed.dtype} [*, "
            f"{packed.in_features}]"
        )


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
