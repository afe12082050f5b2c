"""Products with packed weights, decoded on the way (layout: :mod:`headrace_kernels.triton.quant_layout`).

``W[n, k] = (T(code) - zero_point) * scale * block_scale - minimum * block_minimum``
(:class:`headrace_core.ops.QuantizedWeight`).

* ``_quant_dot_kernel``: a tile of rows by a tile of outputs with ``tl.dot``. What it multiplies are codes, or
  values of the table, which 16-bit floats hold exactly (all but real code books such as nf4); a group's scale
  is applied to its sum, and its minimum to the sum of its activations. A group of an odd size has no tile of
  its own: its weights are made whole in float32 first.
* ``_quant_few_rows_kernel``: one to four rows, without tensor cores, which would take sixteen; weights are
  made whole in float32, or integers are summed as they are.
* ``_quant_finish_kernel``: sums of parts of the inputs, in order, then scales of outputs, steps of rows and
  bias.
* ``_quant_weight_rows_kernel``: rows of the weight itself.
* ``_quant_round_kernel``, ``_quant_round_float8_kernel``: activations in 8 bits, by row.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headrace_kernels.triton.activations import gated


@triton.jit
def _value(
    place, zero, table_ptr, BITS: tl.constexpr, TABLE: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """Places -> ``T(code) - zero_point``: int8 (int16 if it has 8 bits and a zero point) or a float that
    holds it exactly."""
    if TABLE == "none":
        if BITS == 8:
            value = place.to(tl.int8, bitcast=True)
            if HAS_ZEROS:
                value = value.to(tl.int16) - zero.to(tl.int16)
        else:
            value = place.to(tl.int8) - zero
    elif TABLE == "e2m1":
        # The bits of a float16 of 2^-14 the size; small ones become its subnormals.
        bits = place.to(tl.uint16)
        value = ((bits & 7) << 9 | (bits & 8) << 12).to(tl.float16, bitcast=True) * 16384.0
    elif TABLE == "e4m3":
        bits = place.to(tl.uint16)
        value = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(tl.float16, bitcast=True) * 256.0
    elif TABLE == "e5m2":
        value = (place.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        value = tl.load(table_ptr + place.to(tl.int32))
    return value


@triton.jit
def _places(low, high, step, SUB: tl.constexpr, BITS: tl.constexpr):
    """Codes of tile SUB of a step, from its bytes of both planes."""
    MAIN: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    HIGH: tl.constexpr = BITS - MAIN
    if BITS == 8:
        place = low
    else:
        place = (low >> SUB * MAIN) & ((1 << MAIN) - 1)
    if HIGH > 0:
        # A byte of the high plane serves several steps.
        shift = ((step % (MAIN // HIGH)) * (8 // MAIN) + SUB) * HIGH
        above = (high.to(tl.int32) >> shift & ((1 << HIGH) - 1)) << MAIN
        place = place | above.to(tl.uint8)
    return place


@triton.jit
def _octets_at(step, i, col, N, steps, TILE: tl.constexpr, FLOAT8: tl.constexpr):
    """Places [inputs, outputs] of bytes of the low plane; FLOAT8: they lie by output."""
    byte = (step * TILE + i).to(tl.int64)
    if FLOAT8:
        at = byte[:, None] + col.to(tl.int64)[None, :] * (steps * TILE)
    else:
        at = byte[:, None] * N + col[None, :]
    return at


@triton.jit
def _factors(
    scales_ptr, minimums_ptr, block_scales_ptr, block_minimums_ptr, at, block_at, ok,
    HAS_MINIMUMS: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_BLOCK_SCALES: tl.constexpr,
    HAS_BLOCK_MINIMUMS: tl.constexpr,
):  # fmt: skip
    """Scale and minimum of the groups at ``at``, in blocks at ``block_at``; float32."""
    scale = tl.load(scales_ptr + at, mask=ok, other=0)
    minimum = scale
    if HAS_PAIRS:
        minimum = scale >> 4
        scale = scale & 15
    elif HAS_MINIMUMS:
        minimum = tl.load(minimums_ptr + at, mask=ok, other=0)
    scale, minimum = scale.to(tl.float32), minimum.to(tl.float32)
    if HAS_BLOCK_SCALES:
        scale = scale * tl.load(block_scales_ptr + block_at, mask=ok, other=0).to(tl.float32)
    if HAS_BLOCK_MINIMUMS:
        minimum = minimum * tl.load(block_minimums_ptr + block_at, mask=ok, other=0).to(tl.float32)
    return scale, minimum


@triton.jit
def _finished(
    total, row_scales_ptr, x_step, bias_ptr, col, col_ok, HAS_ROW_SCALES: tl.constexpr,
    ROUNDS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Sums [rows, outputs] with what is applied to them at the end; float32. x_step [rows]."""
    total = total.to(tl.float32)
    if HAS_ROW_SCALES:
        total = total * tl.load(row_scales_ptr + col, mask=col_ok, other=0.0)[None, :]
    if ROUNDS_ROWS:
        total = total * x_step[:, None]
    if HAS_BIAS:
        total = total + tl.load(bias_ptr + col, mask=col_ok, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _address(addresses_ptr, expert, PART: tl.constexpr, like):
    """Pointer to an expert's tensor; ``like`` is the first expert's."""
    return tl.multiple_of(tl.load(addresses_ptr + expert * 9 + PART).to(like.dtype), 16)


@triton.jit
def _quant_dot_kernel(
    out_ptr, x_ptr, x_steps_ptr, bias_ptr, codes_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr,
    block_scales_ptr, block_minimums_ptr, row_scales_ptr, table_ptr, addresses_ptr, entry_ptr,
    expert_ptr, x_stride, num_rows, num_experts, N, K, steps, steps_per_split,
    PER_ROW: tl.constexpr, ROUTED: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    TABLE: tl.constexpr, INTEGER: tl.constexpr, FLOAT8: tl.constexpr, ROUNDS_ROWS: tl.constexpr,
    GROUPED: tl.constexpr, PER_INPUT: tl.constexpr, WHOLE_STEP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_BLOCK_SCALES: tl.constexpr,
    HAS_BLOCK_MINIMUMS: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[row, n] = x[row] times row n of the weight; ROUTED: entries in blocks of one expert, as
    :mod:`headrace_kernels.triton.moe` lays them out; SPLIT: sums of a part of the inputs, unfinished."""
    TILES: tl.constexpr = 1 if BITS == 8 else (2 if BITS >= 4 else 4)
    MAIN: tl.constexpr = 8 // TILES
    HIGH: tl.constexpr = BITS - MAIN
    SHARE: tl.constexpr = 1 if HIGH == 0 else MAIN // HIGH  # steps that a byte above serves
    # 8 bits minus a zero point have no room in 8 bits: the zero point is applied to sums of x.
    LATE_ZEROS: tl.constexpr = INTEGER and HAS_ZEROS and BITS == 8
    EARLY_ZEROS: tl.constexpr = HAS_ZEROS and not LATE_ZEROS
    DTYPE: tl.constexpr = tl.int8 if INTEGER else (tl.float8e4nv if FLOAT8 else COMPUTE)
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    # Tensor cores of 9.0 add products of FP8 in few bits: 32 of them, then float32 goes on. With 0 they are
    # widened to float16.
    FEW_BITS: tl.constexpr = 0 if not FLOAT8 or tl.float32 == COMPUTE else 32
    # Groups whose sum is scaled as it ends; else all goes to one sum.
    SCALED: tl.constexpr = GROUPED and not PER_INPUT
    X_SUMS: tl.constexpr = LATE_ZEROS or (HAS_MINIMUMS and not PER_INPUT)

    if ROUTED:
        block = tl.program_id(0)
        expert = tl.load(expert_ptr + block).to(tl.int64)
        if expert >= num_experts:
            return
        line = tl.load(entry_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        codes_ptr = _address(addresses_ptr, expert, 0, codes_ptr)
        if HIGH > 0:
            high_ptr = _address(addresses_ptr, expert, 1, high_ptr)
        if GROUPED:
            scales_ptr = _address(addresses_ptr, expert, 2, scales_ptr)
        if HAS_ZEROS:
            zeros_ptr = _address(addresses_ptr, expert, 3, zeros_ptr)
        if HAS_MINIMUMS and not HAS_PAIRS:
            minimums_ptr = _address(addresses_ptr, expert, 4, minimums_ptr)
        if HAS_BLOCK_SCALES:
            block_scales_ptr = _address(addresses_ptr, expert, 5, block_scales_ptr)
        if HAS_BLOCK_MINIMUMS:
            block_minimums_ptr = _address(addresses_ptr, expert, 6, block_minimums_ptr)
        if HAS_ROW_SCALES:
            row_scales_ptr = _address(addresses_ptr, expert, 7, row_scales_ptr)
        if TABLE == "bytes" or TABLE == "floats":
            table_ptr = _address(addresses_ptr, expert, 8, table_ptr)
        if HAS_BIAS:
            bias_ptr += expert * N
    else:
        line = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = line < num_rows
    row = line // PER_ROW
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_ok = col < N
    part = tl.program_id(2)
    i = tl.arange(0, TILE)
    last = tl.minimum(steps, (part + 1) * steps_per_split)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if SCALED else SUM)
    for step in range(part * steps_per_split, last):
        byte = _octets_at(step, i, col, N, steps, TILE, FLOAT8)
        low = tl.load(codes_ptr + byte, mask=col_ok[None, :], other=0)
        high = low
        if HIGH > 0:
            byte = (step // SHARE * TILE + i).to(tl.int64)[:, None] * N + col[None, :]
            high = tl.load(high_ptr + byte, mask=col_ok[None, :], other=0)
        total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        x_sum = tl.zeros((BLOCK_M,), SUM)
        for sub in tl.static_range(TILES):
            first = (step * TILES + sub) * TILE
            k = first + i
            x = tl.load(
                x_ptr + row[:, None] * x_stride + k[None, :],
                mask=row_ok[:, None] & (k < K)[None, :],
                other=0.0,
            )
            # Behind the last input x is zero and any group does.
            if PER_INPUT:
                within = tl.minimum(k, K - 1)[:, None]
            else:
                within = tl.minimum(first, K - 1)
            at = within // GROUP * N + col[None, :]
            zero = tl.full((1, 1), 0 if BITS == 8 else (1 << (BITS - 1)), tl.int8)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + at, mask=col_ok[None, :], other=0)
            place = _places(low, high, step, sub, BITS)
            if FLOAT8:
                weight = place.to(tl.float8e4nv, bitcast=True)
            else:
                weight = _value(place, zero, table_ptr, BITS, TABLE, EARLY_ZEROS)
            if PER_INPUT:
                scale, minimum = _factors(
                    scales_ptr, minimums_ptr, block_scales_ptr, block_minimums_ptr, at,
                    within // BLOCK * N + col[None, :], col_ok[None, :], HAS_MINIMUMS, HAS_PAIRS,
                    HAS_BLOCK_SCALES, HAS_BLOCK_MINIMUMS,
                )  # fmt: skip
                weight = weight.to(tl.float32) * scale
                if HAS_MINIMUMS:
                    weight = weight - minimum
            if SCALED and not WHOLE_STEP:
                total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
                x_sum = tl.zeros((BLOCK_M,), SUM)
            if SCALED:
                total = tl.dot(
                    x.to(DTYPE), weight.to(DTYPE), total, input_precision="ieee",
                    max_num_imprecise_acc=FEW_BITS, out_dtype=SUM,
                )  # fmt: skip
            else:
                acc = tl.dot(
                    x.to(DTYPE), weight.to(DTYPE), acc, input_precision="ieee",
                    max_num_imprecise_acc=FEW_BITS, out_dtype=SUM,
                )  # fmt: skip
            if X_SUMS:
                x_sum += tl.sum(x.to(SUM), 1)
            if LATE_ZEROS and (not WHOLE_STEP or sub == TILES - 1):
                correction = x_sum[:, None] * zero.to(tl.int32)
                if SCALED:
                    total -= correction
                else:
                    acc -= correction
                    x_sum = tl.zeros((BLOCK_M,), SUM)
            if SCALED and (not WHOLE_STEP or sub == TILES - 1):
                scale, minimum = _factors(
                    scales_ptr, minimums_ptr, block_scales_ptr, block_minimums_ptr, at,
                    within // BLOCK * N + col[None, :], col_ok[None, :], HAS_MINIMUMS, HAS_PAIRS,
                    HAS_BLOCK_SCALES, HAS_BLOCK_MINIMUMS,
                )  # fmt: skip
                acc += total.to(tl.float32) * scale
                if HAS_MINIMUMS:
                    acc -= x_sum.to(tl.float32)[:, None] * minimum

    ok = row_ok[:, None] & col_ok[None, :]
    if SPLIT:
        out = out_ptr + (part.to(tl.int64) * num_rows + line[:, None]) * N + col[None, :]
        tl.store(out, acc, mask=ok)
    else:
        x_step = tl.zeros((BLOCK_M,), tl.float32)
        if ROUNDS_ROWS:
            x_step = tl.load(x_steps_ptr + row, mask=row_ok, other=0.0)
        y = _finished(
            acc, row_scales_ptr, x_step, bias_ptr, col, col_ok, HAS_ROW_SCALES, ROUNDS_ROWS,
            HAS_BIAS,
        )  # fmt: skip
        out = out_ptr + line[:, None] * N + col[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _quant_few_rows_kernel(
    out_ptr, x_ptr, codes_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, block_scales_ptr,
    block_minimums_ptr, table_ptr, x_stride, num_rows, N, K, steps, steps_per_split,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    TABLE: tl.constexpr, INTEGER: tl.constexpr, FLOAT8: tl.constexpr, GROUPED: tl.constexpr,
    PER_INPUT: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_PAIRS: tl.constexpr,
    HAS_BLOCK_SCALES: tl.constexpr, HAS_BLOCK_MINIMUMS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[part, row, n]: sums of a part of the inputs, unfinished."""
    TILES: tl.constexpr = 1 if BITS == 8 else (2 if BITS >= 4 else 4)
    MAIN: tl.constexpr = 8 // TILES
    HIGH: tl.constexpr = BITS - MAIN
    SHARE: tl.constexpr = 1 if HIGH == 0 else MAIN // HIGH
    SUM: tl.constexpr = tl.int32 if INTEGER and not GROUPED else tl.float32

    row = tl.arange(0, BLOCK_M)
    row_ok = row < num_rows
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_ok = col < N
    part = tl.program_id(1)
    i = tl.arange(0, TILE)
    last = tl.minimum(steps, (part + 1) * steps_per_split)
    acc = tl.zeros((BLOCK_M, TILE, BLOCK_N), SUM)
    for step in range(part * steps_per_split, last):
        byte = _octets_at(step, i, col, N, steps, TILE, FLOAT8)
        low = tl.load(codes_ptr + byte, mask=col_ok[None, :], other=0)
        high = low
        if HIGH > 0:
            byte = (step // SHARE * TILE + i).to(tl.int64)[:, None] * N + col[None, :]
            high = tl.load(high_ptr + byte, mask=col_ok[None, :], other=0)
        for sub in tl.static_range(TILES):
            first = (step * TILES + sub) * TILE
            k = first + i
            x = tl.load(
                x_ptr + row[:, None] * x_stride + k[None, :],
                mask=row_ok[:, None] & (k < K)[None, :],
                other=0.0,
            )
            if PER_INPUT:
                within = tl.minimum(k, K - 1)[:, None]
            else:
                within = tl.minimum(first, K - 1)
            at = within // GROUP * N + col[None, :]
            zero = tl.full((1, 1), 0 if BITS == 8 else (1 << (BITS - 1)), tl.int8)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + at, mask=col_ok[None, :], other=0)
            place = _places(low, high, step, sub, BITS)
            weight = _value(place, zero, table_ptr, BITS, TABLE, HAS_ZEROS).to(SUM)
            if GROUPED:
                scale, minimum = _factors(
                    scales_ptr, minimums_ptr, block_scales_ptr, block_minimums_ptr, at,
                    within // BLOCK * N + col[None, :], col_ok[None, :], HAS_MINIMUMS, HAS_PAIRS,
                    HAS_BLOCK_SCALES, HAS_BLOCK_MINIMUMS,
                )  # fmt: skip
                weight = weight * scale
                if HAS_MINIMUMS:
                    weight = weight - minimum
            acc += x.to(SUM)[:, :, None] * weight[None, :, :]
    out = out_ptr + (part.to(tl.int64) * num_rows + row[:, None]) * N + col[None, :]
    tl.store(out, tl.sum(acc, 1), mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def _quant_finish_kernel(
    out_ptr, parts_ptr, x_steps_ptr, row_scales_ptr, bias_ptr, num_rows, N, size, splits,
    GATED: tl.constexpr, KIND: tl.constexpr, HAS_ROW_SCALES: tl.constexpr,
    ROUNDS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[row, :size] = sum of the parts [splits, num_rows, N], in order, and what comes at the end; GATED:
    of outputs n and size + n, a gate and what it lets through."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = col < size
    x_step = tl.zeros((1,), tl.float32)
    if ROUNDS_ROWS:
        x_step = tl.load(x_steps_ptr + row)
    y = _summed(
        parts_ptr, row_scales_ptr, x_step, bias_ptr, row, col, ok, num_rows, N, splits,
        HAS_ROW_SCALES, ROUNDS_ROWS, HAS_BIAS,
    )  # fmt: skip
    y = y.to(out_ptr.dtype.element_ty)
    if GATED:
        # Both are rounded first: the bits are those of a product and an activation, one after the other.
        up = _summed(
            parts_ptr, row_scales_ptr, x_step, bias_ptr, row, size + col, ok, num_rows, N, splits,
            HAS_ROW_SCALES, ROUNDS_ROWS, HAS_BIAS,
        )  # fmt: skip
        up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        y = gated(y.to(tl.float32), up, KIND).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * size + col[None, :], y, mask=ok[None, :])


@triton.jit
def _summed(
    parts_ptr, row_scales_ptr, x_step, bias_ptr, row, col, ok, num_rows, N, splits,
    HAS_ROW_SCALES: tl.constexpr, ROUNDS_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    total = tl.load(parts_ptr + row[:, None] * N + col[None, :], mask=ok[None, :], other=0)
    for part in range(1, splits):
        at = (part * num_rows + row)[:, None] * N + col[None, :]
        total += tl.load(parts_ptr + at, mask=ok[None, :], other=0)
    return _finished(
        total, row_scales_ptr, x_step, bias_ptr, col, ok, HAS_ROW_SCALES, ROUNDS_ROWS, HAS_BIAS
    )


@triton.jit
def _quant_weight_rows_kernel(
    out_ptr, ids_ptr, codes_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, block_scales_ptr,
    block_minimums_ptr, row_scales_ptr, table_ptr, N, K,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    TABLE: tl.constexpr, FLOAT8: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, HAS_PAIRS: tl.constexpr, HAS_BLOCK_SCALES: tl.constexpr,
    HAS_BLOCK_MINIMUMS: tl.constexpr, HAS_ROW_SCALES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[t] = row ids[t] of the weight."""
    TILES: tl.constexpr = 1 if BITS == 8 else (2 if BITS >= 4 else 4)
    MAIN: tl.constexpr = 8 // TILES
    HIGH: tl.constexpr = BITS - MAIN
    n = tl.load(ids_ptr + tl.program_id(0))
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    ok = k < K
    tile, i = k // TILE, k % TILE
    byte = (tile // TILES * TILE + i).to(tl.int64) * N + n
    if FLOAT8:
        byte = n.to(tl.int64) * (tl.cdiv(K, TILE) * TILE) + k
    place = tl.load(codes_ptr + byte, mask=ok, other=0)
    if BITS != 8:
        place = place >> (tile % TILES * MAIN).to(tl.uint8) & ((1 << MAIN) - 1)
    if HIGH > 0:
        PER_BYTE: tl.constexpr = 8 // HIGH
        byte = (tile // PER_BYTE * TILE + i).to(tl.int64) * N + n
        high = tl.load(high_ptr + byte, mask=ok, other=0) >> (tile % PER_BYTE * HIGH).to(tl.uint8)
        place = place | (high & ((1 << HIGH) - 1)) << MAIN
    at = (k // GROUP).to(tl.int64) * N + n
    zero = tl.full((1,), 0 if BITS == 8 else (1 << (BITS - 1)), tl.int8)
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + at, mask=ok, other=0)
    weight = _value(place, zero, table_ptr, BITS, TABLE, HAS_ZEROS).to(tl.float32)
    if GROUPED:
        scale, minimum = _factors(
            scales_ptr, minimums_ptr, block_scales_ptr, block_minimums_ptr, at,
            (k // BLOCK).to(tl.int64) * N + n, ok, HAS_MINIMUMS, HAS_PAIRS, HAS_BLOCK_SCALES,
            HAS_BLOCK_MINIMUMS,
        )  # fmt: skip
        weight = weight * scale
        if HAS_MINIMUMS:
            weight = weight - minimum
    if HAS_ROW_SCALES:
        weight = weight * tl.load(row_scales_ptr + n)
    out = out_ptr + tl.program_id(0).to(tl.int64) * K + k
    tl.store(out, weight.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _step_of_row(x_ptr, row, x_stride, K, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """A row's largest magnitude / LARGEST; 1 of zeros, NaN if the row has one."""
    largest = tl.zeros((BLOCK,), tl.float32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        size = tl.abs(x)
        largest = tl.where(size > largest, size, largest)
        strange = strange | (x != x).to(tl.int32)
    # An exact quotient: that of `/` is off by a bit now and then, on a GPU.
    step = tl.div_rn(tl.max(largest, 0), LARGEST)
    step = tl.where(step == 0.0, 1.0, step)
    return tl.where(tl.max(strange, 0) > 0, float("nan"), step)


@triton.jit
def _quotient(x, step, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """x / step within the codes' range; 0 in a row without numbers, whose step says so."""
    quotient = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + step)
    quotient = tl.where(quotient == quotient, quotient, 0.0)
    # A step among the smallest numbers is coarse: a quotient may be beyond the largest code.
    return tl.where(quotient > LARGEST, LARGEST, tl.where(quotient < -LARGEST, -LARGEST, quotient))


@triton.jit
def _quant_round_kernel(x_ptr, codes_ptr, steps_ptr, x_stride, out_stride, K, BLOCK: tl.constexpr):
    """Codes int8 and step of a row: its largest magnitude / 127; see :class:`QuantLinearOp`."""
    row = tl.program_id(0).to(tl.int64)
    step = _step_of_row(x_ptr, row, x_stride, K, 127.0, BLOCK)
    tl.store(steps_ptr + row, step)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        code = _quotient(x, step, 127.0, BLOCK)
        # Adding 1.5 * 2^23 leaves no places behind the point: ties go to even.
        code = (code + 12582912.0) - 12582912.0
        tl.store(codes_ptr + row * out_stride + k, code.to(tl.int8), mask=k < K)


@triton.jit
def _quant_round_float8_kernel(
    x_ptr, codes_ptr, steps_ptr, x_stride, out_stride, K, BLOCK: tl.constexpr
):
    """Bytes of E4M3 and step of a row: its largest magnitude / 448; see :class:`QuantLinearOp`."""
    row = tl.program_id(0).to(tl.int64)
    step = _step_of_row(x_ptr, row, x_stride, K, 448.0, BLOCK)
    tl.store(steps_ptr + row, step)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        octet = _float8_octet(_quotient(x, step, 448.0, BLOCK))
        tl.store(codes_ptr + row * out_stride + k, octet, mask=k < K)


@triton.jit
def _float8_octet(value):
    """Float32 of at most 448 in magnitude -> the bytes of the nearest E4M3, ties to even, uint8. In integers:
    the interpreter's conversion rounds otherwise."""
    bits = value.to(tl.int32, bitcast=True)
    size = tl.abs(value)
    # 20 bits of the mantissa go; exponents are counted from 2^-7 on, not from 2^-127.
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9; adding 2^23 leaves no places behind the point.
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
