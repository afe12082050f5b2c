"""Layout of packed weights for the kernels of :mod:`headrace_kernels.triton.quant_kernels`.

The inputs are cut into tiles of ``tile`` inputs (16, 32 or 64). A byte holds one code of each of several
neighbouring tiles: byte i of a row of bytes holds input i of the first tile in its lowest bits, input i of
the second above it, and so on. So a kernel loads a byte once, and each shift of it is a whole tile of
``tl.dot``: nothing is shuffled. Codes of 3, 5 and 6 bits lie in two planes: the low 2 or 4 bits, and what is
above.

Outputs are the fast axis of every tensor: codes [bytes of inputs, N], scales [groups, N]. Codes that are
multiplied as FP8 are the exception, [N, bytes of inputs]: tensor cores, and ``torch._scaled_mm``, want 8-bit
floats with inputs side by side. Scales that are whole numbers are bytes; others have 16 bits if that changes
none of them, else 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import QuantizedWeight

_MAX_INTEGER_INPUTS = 1 << 16
"""Inputs whose products of 8 bits, with a zero point, a sum of 32 bits holds for certain:
127 * 255 * 65536 < 2^31."""
_SCALES = (2, 4, 5, 6)
"""Places of :class:`QuantTensors` that hold scales or minimums of groups and blocks."""
_TILES = (64, 32, 16)
"""Inputs of a tile; ``tl.dot`` takes no fewer."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class QuantLayout:
    """Properties that the kernels are compiled for; experts that are joined have equal ones."""

    bits: int
    tile: int
    """Inputs of a tile."""
    group_size: int
    block_size: int
    table: str
    """``none``; ``e2m1``, ``e4m3``, ``e5m2``: decoded by bits; ``bytes``, ``floats``: looked up."""
    activations: str
    """One of :data:`headrace_core.ops.QUANT_ACTIVATIONS`."""
    integer: bool
    """True if activations and weights are multiplied as integers of 8 bits."""
    float8: bool
    """True if activations and weights are multiplied as E4M3; codes then lie by output."""
    grouped: bool
    """True if scales or minimums are applied while inputs are summed; False: once, at the end."""
    per_input: bool
    """True if a group is no row of whole tiles: every input looks up its own scale."""
    has_zeros: bool
    has_minimums: bool
    has_pairs: bool
    """True if a byte holds a scale and a minimum of 4 bits each."""
    has_block_scales: bool
    has_block_minimums: bool
    has_row_scales: bool
    dtypes: tuple[str | None, ...]
    """Types of :attr:`QuantTensors`."""

    @property
    def rounds_rows(self) -> bool:
        """True if activations are rounded to 8 bits."""
        return self.activations != "float"

    @property
    def main_bits(self) -> int:
        """Bits of the low plane."""
        return 8 if self.bits == 8 else 4 if self.bits >= 4 else 2

    @property
    def step(self) -> int:
        """Inputs that one byte of the low plane, and its neighbours in the tile, hold."""
        return 8 // self.main_bits * self.tile

    @property
    def whole_step(self) -> bool:
        """True if all inputs of a step are in one group."""
        return self.group_size % self.step == 0


@dataclass(frozen=True, slots=True)
class QuantTensors:
    """Tensors of a packed weight; the kernels take them in this order."""

    codes: Tensor
    """Low plane, uint8 [bytes, N], or [N, bytes] of FP8. Codes of 8 bits without a table are int8 as they
    were, others are places from 0 on."""
    high: Tensor | None
    """High plane, uint8 [bytes, N]."""
    scales: Tensor | None
    """[groups, N]"""
    zeros: Tensor | None
    """[groups, N] int8; of less than 8 bits from 0 on, as the codes."""
    minimums: Tensor | None
    """[groups, N]"""
    block_scales: Tensor | None
    """[blocks, N]"""
    block_minimums: Tensor | None
    """[blocks, N]"""
    row_scales: Tensor | None
    """[N] float32, applied to the sum."""
    table: Tensor | None
    """[2 ** bits] int8 or float32."""

    def each(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.each() if x is not None)


def lay_out(
    weight: QuantizedWeight, *, activations: str, max_integer_inputs: int = _MAX_INTEGER_INPUTS
) -> tuple[QuantLayout, QuantTensors]:
    """The weight, packed.

    Raises:
        ConfigError: activations are to be FP8, and the weight's table is not E4M3.
    """
    if activations == "fp8" and not _is_float8(weight, torch.float8_e4m3fn):
        raise ConfigError(
            "model.quantization_activations = 'fp8': of weights in E4M3 only; with this one, which has "
            f"{'another table' if weight.table is not None else 'integers'}, it must be 'auto', 'float' "
            "or 'int8'",
            field="model.quantization_activations",
        )
    inputs, bits = weight.values.shape[1], weight.bits
    places = (weight.values.short() + (1 << bits - 1)).byte()
    table, factor, entries = _table(weight, places, as_integers=activations == "int8")
    whole = max(1, inputs)
    group_size, block_size = (
        whole if size is None else size for size in (weight.group_size, weight.block_size)
    )
    single = weight.scales.shape[1] == 1
    per_input = not single and group_size % _TILES[-1] != 0
    tile = _tile(bits, whole if single or per_input else group_size, any_size=single or per_input)
    # The compiler multiplies 8 bits by 8 bits in tiles of 32 inputs or more.
    octets = not per_input and tile >= 32
    integer = octets and activations == "int8" and table in ("none", "bytes")
    float8 = octets and activations == "fp8" and table == "e4m3"

    scales: Tensor | None = weight.scales
    block_scales, row_scales = weight.block_scales, None
    if weight.minimums is None and block_scales is not None and block_scales.shape[1] == 1:
        row_scales, block_scales = block_scales[:, 0] * factor, None
    elif weight.minimums is None and single:
        row_scales = torch.full_like(weight.scales[:, 0], factor)
    elif factor != 1.0 and block_scales is not None:
        block_scales = block_scales * factor
    elif factor != 1.0:
        scales = weight.scales * factor
    if weight.minimums is None and single:
        assert row_scales is not None
        whole_scales = row_scales * weight.scales[:, 0]
        if integer and inputs > max_integer_inputs:
            row_scales, scales = None, whole_scales[:, None]
        else:
            row_scales, scales = whole_scales, None

    narrow_scales, minimums = _narrow(scales), _narrow(weight.minimums)
    pairs = _fits_four_bits(narrow_scales) and _fits_four_bits(minimums)
    if pairs:
        assert narrow_scales is not None
        assert minimums is not None
        narrow_scales, minimums = narrow_scales | minimums << 4, None
    zeros = weight.zero_points
    if zeros is not None and bits < 8:
        zeros = zeros + (1 << bits - 1)
    main_bits = 8 if bits == 8 else 4 if bits >= 4 else 2
    pad = 0 if entries is None else int(entries.isfinite().byte().argmax())
    stored = weight.values.view(torch.uint8) if bits == 8 and table == "none" else places
    codes = _plane(stored, 0, main_bits, tile, pad)
    tensors = QuantTensors(
        codes=codes.T.contiguous() if float8 else codes,
        high=_plane(stored, main_bits, bits - main_bits, tile, pad) if bits > main_bits else None,
        scales=narrow_scales,
        zeros=None if zeros is None else zeros.T.contiguous(),
        minimums=minimums,
        block_scales=_narrow(block_scales),
        block_minimums=_narrow(weight.block_minimums),
        row_scales=None if row_scales is None else row_scales.contiguous(),
        table=entries,
    )
    layout = QuantLayout(
        bits=bits,
        tile=tile,
        group_size=_round_up(whole, 8 * tile) if single else group_size,
        block_size=_round_up(whole, 8 * tile) if single else block_size,
        table=table,
        activations=activations,
        integer=integer,
        float8=float8,
        grouped=scales is not None,
        per_input=per_input,
        has_zeros=zeros is not None,
        has_minimums=weight.minimums is not None,
        has_pairs=pairs,
        has_block_scales=block_scales is not None,
        has_block_minimums=weight.minimums is not None and weight.block_minimums is not None,
        has_row_scales=row_scales is not None,
        dtypes=_dtypes(tensors),
    )
    return layout, tensors


def made_alike(
    each: Sequence[tuple[QuantLayout, QuantTensors]],
) -> list[tuple[QuantLayout, QuantTensors]] | None:
    """The weights with one layout, if scales of another type are all that differs; else None."""
    first = each[0][0]
    if any(layout.has_pairs != first.has_pairs for layout, _ in each):
        each = [_unpaired(*one) for one in each]
    made = [list(tensors.each()) for _, tensors in each]
    for at in _SCALES:
        tensors = [parts[at] for parts in made]
        dtypes = {None if x is None else x.dtype for x in tensors}
        if len(dtypes) > 1 and None not in dtypes:
            wide = torch.float16 if dtypes == {torch.uint8, torch.int8} else torch.float32
            for parts, tensor in zip(made, tensors, strict=True):
                assert tensor is not None
                parts[at] = tensor.to(wide)
    result = [
        _with(layout, QuantTensors(*parts))  # type: ignore[arg-type]
        for (layout, _), parts in zip(each, made, strict=True)
    ]
    return result if len({layout for layout, _ in result}) == 1 else None


def _unpaired(layout: QuantLayout, tensors: QuantTensors) -> tuple[QuantLayout, QuantTensors]:
    if not layout.has_pairs:
        return layout, tensors
    assert tensors.scales is not None
    apart = replace(tensors, scales=tensors.scales & 15, minimums=tensors.scales >> 4)
    return _with(replace(layout, has_pairs=False), apart)


def _with(layout: QuantLayout, tensors: QuantTensors) -> tuple[QuantLayout, QuantTensors]:
    return replace(layout, dtypes=_dtypes(tensors)), tensors


def _dtypes(tensors: QuantTensors) -> tuple[str | None, ...]:
    return tuple(None if x is None else str(x.dtype) for x in tensors.each())


def _tile(bits: int, group_size: int, *, any_size: bool) -> int:
    """Inputs of a tile: a step's are in one group, or else a tile's."""
    if any_size:
        return 64 if group_size >= 64 else 32
    per_byte = 1 if bits == 8 else 2 if bits >= 4 else 4
    for tile in (64, 32):
        if group_size % (tile * per_byte) == 0:
            return tile
    return next(tile for tile in _TILES if group_size % tile == 0)


def _table(
    weight: QuantizedWeight, places: Tensor, *, as_integers: bool
) -> tuple[str, float, Tensor | None]:
    """Kind of the table, the factor that its entries were divided by, and the entries to look up."""
    table = weight.table
    if table is None:
        return "none", 1.0, None
    if weight.bits == 8:
        for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
            if _is_float8(weight, dtype):
                if kind == "e5m2" or not bool(((places & 0x7F) == 0x7F).any()):
                    return kind, 1.0, None
                break  # the kernels know no NaN in e4m3
    elif weight.bits == 4 and not as_integers and _equal(table, torch.tensor(_E2M1)):
        return "e2m1", 1.0, None
    for power in range(8 if as_integers else 1):
        scaled = table * 2.0**power
        if bool(((scaled == scaled.round()) & (scaled.abs() <= 127)).all()):
            return "bytes", 2.0**-power, scaled.to(torch.int8)
    largest = float(table.nan_to_num(0, 0, 0).abs().amax())
    factor = 2.0 ** math.frexp(largest)[1]
    return "floats", factor, table / factor


def _is_float8(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True if the table has the numbers that this type's bytes stand for, in their order."""
    if weight.table is None or weight.bits != 8:
        return False
    return _equal(weight.table, torch.arange(256).byte().view(dtype).float())


def _equal(table: Tensor, other: Tensor) -> bool:
    return torch.allclose(table.cpu(), other, rtol=0, atol=0, equal_nan=True)


def _narrow(x: Tensor | None) -> Tensor | None:
    """x [N, groups] -> [groups, N] in the smallest type that has all of its numbers."""
    if x is None:
        return None
    for dtype in (torch.uint8, torch.int8, torch.float16, torch.bfloat16):
        small = x.nan_to_num(0, 0, 0).to(dtype)
        if torch.equal(small.float(), x):
            return small.T.contiguous()
    return x.T.contiguous()


def _fits_four_bits(x: Tensor | None) -> bool:
    return x is not None and x.dtype is torch.uint8 and not bool((x > 15).any())


def _plane(places: Tensor, shift: int, width: int, tile: int, pad: int) -> Tensor:
    """``width`` bits of places [N, K] from bit ``shift`` on -> [bytes, N], as the module says."""
    per_byte, (outputs, inputs) = 8 // width, places.shape
    padded = places.new_full((_round_up(inputs, per_byte * tile), outputs), pad)
    padded[:inputs] = places.T
    bits = (padded >> shift & (1 << width) - 1).view(-1, per_byte, tile, outputs)
    plane = bits[:, 0].clone()
    for at in range(1, per_byte):
        plane |= bits[:, at] << at * width
    return plane.reshape(-1, outputs)


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
