"""Layouts of packed weights: how the native library stores a :class:`QuantizedWeight`.

Codes keep their bits. Scales, minimums and those of blocks are stored in the narrowest number that holds
all of them exactly: a byte or half of one, a 16-bit float, or float32. A byte holds whole numbers, powers of
two, or numbers of float8_e4m3fn. native/src/quant_layout.h says where
everything lies.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.ops import QuantizedWeight, Rounding
from headrace_kernels.cpu.library import DTYPES

_ABSENT, _SIGNED_BYTE, _BYTE, _NIBBLE, _EXPONENT_BYTE, _E4M3_BYTE = -1, 3, 4, 5, 6, 7
"""Storage that is no float, as in native/src/quant_layout.h."""
_TABLES = {8: 15, 16: 16}
"""Kinds of codes that choose from a table, by its entries; other kinds are numbers of bits, or below."""
_FLOAT8 = {torch.float8_e4m3fn: 17, torch.float8_e5m2: 18}
"""Kinds of codes that are floats."""
_FLOAT6 = 19
"""Kind of codes that are a place among 32 numbers, and a bit that turns its sign."""
_FLOATS = {name: DTYPES[name] for name in ("bfloat16", "float16", "float32")}
"""Floats that scales are stored in, the first that holds them wins."""
MAX_GROUP = 32768
"""Inputs whose products a 32-bit sum holds for certain (255 * 127 * 66311 < 2^31); a longer group
is cut in two of equal scale."""
_FINE_STEPS = 32639
"""Largest entry of a table whose entries are put in 16 bits."""


class Layout(ctypes.Structure):
    """``Layout`` of native/src/quant_layout.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "K", "group", "block")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "kind", "zero", "has_zeros", "scales", "minimums", "block_scales",
                "block_minimums", "tables",
            )
        ),
        ("factor", ctypes.c_float),
        ("table", ctypes.c_uint8 * 48),
        ("book", ctypes.c_float * 16),
    ]  # fmt: skip

    @property
    def address(self) -> int:
        return ctypes.addressof(self)

    @property
    def family(self) -> tuple[int, ...]:
        """Properties that experts of one kernel call share; each says itself how its scales are stored."""
        return self.N, self.K, self.group, self.kind, self.minimums != _ABSENT


def layout_for(weight: QuantizedWeight, dtype: str) -> Layout:
    """How the native library stores this weight for activations of ``dtype``.

    Raises:
        ConfigError: it has no layout for such groups or such a table.
    """
    rows, inputs = weight.values.shape
    whole = max(4, inputs)
    layout = Layout(N=rows, K=inputs, group=weight.group_size or whole)
    layout.block = weight.block_size or whole
    if layout.group % 4 and layout.group < inputs:
        raise ConfigError(f"quant_linear: group_size {layout.group} is not a multiple of 4")
    layout.kind, layout.factor = weight.bits, 1
    if weight.table is None:
        _set_zeros(layout, weight)
    elif weight.table.numel() in _TABLES:
        _set_table(layout, weight.table, dtype)
    elif weight.bits == 6:
        _set_float6(layout, weight)
    else:
        _set_float8(layout, weight)
    layout.scales = _scale_storage(weight.scales)
    layout.minimums = _whole_storage(weight.minimums)
    layout.block_scales = _storage(weight.block_scales)
    layout.block_minimums = _storage(weight.block_minimums)
    return layout


def layout_of_rounded(rows: int, inputs: int, rounding: Rounding) -> Layout:
    """Layout of a weight that the native library rounds itself."""
    whole, bits = max(4, inputs), rounding.bits
    layout = Layout(N=rows, K=inputs, group=rounding.group_size or whole, block=whole)
    layout.kind, layout.zero, layout.factor = bits, 1 << (bits - 1), 1
    layout.scales = DTYPES["float32" if rounding.group_size is None else "bfloat16"]
    layout.minimums = layout.block_scales = layout.block_minimums = _ABSENT
    return layout


def cut_long_groups(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with no group of more inputs than twice :data:`MAX_GROUP`."""
    in_features = weight.values.shape[1]
    group = weight.group_size or in_features
    if min(group, in_features) <= 2 * MAX_GROUP:
        return weight
    if weight.group_size is not None and group % MAX_GROUP:
        raise ConfigError(
            f"quant_linear: group_size {group} is over {2 * MAX_GROUP} and no multiple of "
            f"{MAX_GROUP}"
        )
    count = -(-in_features // MAX_GROUP)
    times = -(-min(group, in_features) // MAX_GROUP)

    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(times, dim=1)[:, :count]

    scales = spread(weight.scales)
    assert scales is not None
    return replace(
        weight,
        scales=scales,
        zero_points=spread(weight.zero_points),
        minimums=spread(weight.minimums),
        group_size=MAX_GROUP,
    )


def widened(weight: QuantizedWeight) -> QuantizedWeight:
    """Codes of 6 bits with a table as bytes of E4M3, unless the table's second half is its first half,
    negative (as in E2M3 and E3M2): the library looks up the first half only.

    Raises:
        ConfigError: an entry of the table is no number of E4M3.
    """
    table = weight.table
    if table is None or weight.bits != 6:
        return weight
    octets = _float8_octets(table)
    if torch.equal(octets[32:], octets[:32] ^ 128):
        return weight
    return replace(
        weight,
        values=(octets ^ 128)[weight.values.int() + 32].view(torch.int8),
        bits=8,
        table=torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    )


def _float8_octets(table: Tensor) -> Tensor:
    """Bytes of E4M3, uint8: it has all numbers of E2M3 and E3M2 (MXFP6)."""
    numbers = table.to(torch.float8_e4m3fn)
    if not torch.equal(numbers.float(), table):
        raise ConfigError(
            "quant_linear: a table of 64 entries: each must be a number of torch.float8_e4m3fn"
        )
    return numbers.view(torch.uint8)


def _set_zeros(layout: Layout, weight: QuantizedWeight) -> None:
    zeros, middle = weight.zero_points, 1 << (weight.bits - 1)
    layout.zero = middle
    if zeros is None or not zeros.numel():
        return
    if bool((zeros == zeros[0, 0]).all()):
        layout.zero = middle + int(zeros[0, 0])
    else:
        layout.has_zeros = 1


def _are_whole(x: Tensor, least: int, most: int) -> bool:
    return bool(((x == x.round()) & (x >= least) & (x <= most)).all())


def _storage(x: Tensor | None) -> int:
    """Narrowest float that holds x."""
    if x is None:
        return _ABSENT
    for name, code in _FLOATS.items():
        if torch.equal(x.to(getattr(torch, name)).float(), x):
            return code
    return _FLOATS["float32"]


def _scale_storage(x: Tensor) -> int:
    """A byte, or the narrowest float that holds x."""
    if _are_whole(x, -128, 127):
        return _SIGNED_BYTE
    bits = x.contiguous().view(torch.int32)
    if bool(((bits & 0x807FFFFF) == 0).all()) and bool(x.isfinite().all()):
        return _EXPONENT_BYTE
    if torch.equal(x.to(torch.float8_e4m3fn).float(), x):
        return _E4M3_BYTE
    return _storage(x)


def _whole_storage(x: Tensor | None) -> int:
    """Half a byte, a byte, or the narrowest float that holds x."""
    if x is None or not _are_whole(x, 0, 255):
        return _storage(x)
    return _NIBBLE if _are_whole(x, 0, 15) else _BYTE


# --- tables -----------------------------------------------------------------------------------


def _set_float6(layout: Layout, weight: QuantizedWeight) -> None:
    assert weight.table is not None
    _take_no_minimums(weight)
    layout.kind = _FLOAT6
    layout.table[:32] = _float8_octets(weight.table)[:32].tolist()


def _take_no_minimums(weight: QuantizedWeight) -> None:
    if weight.minimums is not None:
        raise ConfigError("quant_linear: a weight of floats takes no minimums")


def _set_float8(layout: Layout, weight: QuantizedWeight) -> None:
    table = weight.table
    assert table is not None
    kinds = [kind for dtype, kind in _FLOAT8.items() if _is_float8(table, dtype)]
    if not kinds:
        raise ConfigError(
            f"quant_linear: a table of {table.numel()} entries; it may have 8, 16, 64 of those of "
            "torch.float8_e4m3fn, or 256 that are those of torch.float8_e4m3fn or torch.float8_e5m2"
        )
    _take_no_minimums(weight)
    for place in table.isfinite().logical_not().nonzero().flatten().tolist():
        if bool((weight.values == place - 128).any()):
            raise WeightsError("the weight holds infinities or NaN")
    layout.kind = kinds[0]


def _is_float8(table: Tensor, dtype: torch.dtype) -> bool:
    if table.numel() != 256:
        return False
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return torch.equal(values.nan_to_num(), table.nan_to_num())


def _set_table(layout: Layout, table: Tensor, dtype: str) -> None:
    if not bool(table.isfinite().all()):
        raise ConfigError("quant_linear: a table holds infinities or NaN")
    entries = _table_entries(tuple(table.tolist()), 3 if dtype == "float32" else 2)
    layout.kind, layout.zero, layout.tables = _TABLES[table.numel()], 128, len(entries.bytes)
    layout.factor = entries.factor
    for at, each in enumerate(entries.bytes):
        layout.table[16 * at : 16 * at + len(each)] = each
    for at, value in enumerate(table.tolist()):
        layout.book[at] = value


@dataclass(frozen=True, slots=True)
class _TableEntries:
    factor: float
    bytes: tuple[tuple[int, ...], ...]
    """Entries / factor + 128; the first of several tables holds the high bytes."""


@functools.cache
def _table_entries(values: tuple[float, ...], num_bytes: int) -> _TableEntries:
    """Entries as multiples of a factor, in a byte if that is exact, else in ``num_bytes``."""
    table = torch.tensor(values, dtype=torch.float64)
    largest = float(table.abs().max())
    for steps in range(1, 128):
        factor = (largest or 1.0) / steps
        whole = (table / factor).round()
        if torch.equal((whole * factor).float(), table.float()):
            return _TableEntries(factor, (_shifted(whole),))
    fine = _best_steps(table / largest) if num_bytes == 2 else _FINE_STEPS * 256.0
    whole = (table * (fine / largest)).round()
    found = []
    for _ in range(num_bytes - 1):
        higher = ((whole + 128) / 256).floor()
        found.append(_shifted(whole - 256 * higher))
        whole = higher
    return _TableEntries(largest / fine, (_shifted(whole), *reversed(found)))


def _best_steps(table: Tensor) -> float:
    """How many steps the largest entry takes so that all entries are nearest to whole steps.

    At most :data:`_FINE_STEPS`, at least half of them: an error is below 2^-15 of the largest entry; for 16
    entries this choice leaves less than half of it.
    """
    steps = torch.linspace(_FINE_STEPS / 2, _FINE_STEPS, 200_000, dtype=torch.float64)
    scaled = table[:, None] * steps
    errors = ((scaled - scaled.round()) / steps).square().sum(0)
    return float(steps[errors.argmin()])


def _shifted(whole: Tensor) -> tuple[int, ...]:
    return tuple(int(value) + 128 for value in whole.tolist())
