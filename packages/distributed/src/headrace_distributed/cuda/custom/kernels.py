"""One-shot and two-shot all-reduce in Triton: :mod:`headrace_distributed.cuda.custom.protocol` as code.

One-shot: every rank reads all ranks' tensors and adds them up; world_size times the bytes, one meeting.
Two-shot: a rank adds up its part, and then reads the others' sums; twice the bytes, two meetings.

Both add in the order of ranks, floats of 16 bits in float32, and round once: all ranks hold the same bits,
whichever ran.

Memory order (PTX ISA, "Memory Consistency Model"): a program's threads write, pass a barrier, and then one
of them sets flags with release semantics for the whole system; who waits reads them with acquire semantics,
and lets its threads pass a barrier before they read. Source of the two ways: Thakur, Rabenseifner & Gropp
2005, doi:10.1177/1094342005051521.
"""

# Kernels are traced by triton, not called: their parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _meet(bases_ptr, program, rank, flag, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Return when this program of every rank has come here; what they wrote before is seen from now on."""
    lane = tl.arange(0, LANES)
    is_rank = lane < WORLD
    bases = tl.load(bases_ptr + lane, mask=is_rank, other=0)
    theirs = (bases + (program * WORLD + rank) * 8).to(tl.pointer_type(tl.int64))
    own = (tl.load(bases_ptr + rank) + (program * WORLD + lane) * 8).to(tl.pointer_type(tl.int64))
    flags = tl.zeros([LANES], tl.int64) + flag
    tl.debug_barrier()
    tl.atomic_xchg(theirs, flags, mask=is_rank, sem="release", scope="sys")
    seen = flags - 1
    while tl.min(tl.where(is_rank, seen, flags), axis=0) < flag:
        seen = tl.atomic_add(
            own, tl.zeros([LANES], tl.int64), mask=is_rank, sem="acquire", scope="sys"
        )
    tl.debug_barrier()


@triton.jit
def _end(own, operation, OPERATION_AT: tl.constexpr, DONE_AT: tl.constexpr):
    """The last program to come here raises the number of the operation."""
    done_ptr = (own + DONE_AT).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(done_ptr, 0)
        tl.store((own + OPERATION_AT).to(tl.pointer_type(tl.int64)), operation + 1)


@triton.jit
def _rounded(x):
    """Float32 -> the nearest bfloat16, as float32; to even. NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)


@triton.jit
def _slot(base, slot_at, like_ptr):
    """Where a rank's slot is; said to be aligned, or values would be read one by one."""
    return tl.multiple_of((base + slot_at).to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@triton.jit
def _sum(
    bases_ptr,
    slot_at,
    at,
    ok,
    like_ptr,
    WORLD: tl.constexpr,
    WIDEN: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Elements ``at`` of all ranks' slots, added up from rank 0 on."""
    total = tl.load(_slot(tl.load(bases_ptr), slot_at, like_ptr) + at, mask=ok, other=0)
    if WIDEN:
        total = total.to(tl.float32)
    for rank in tl.static_range(1, WORLD):
        theirs = _slot(tl.load(bases_ptr + rank), slot_at, like_ptr)
        part = tl.load(theirs + at, mask=ok, other=0)
        if WIDEN:
            part = part.to(tl.float32)
        total += part
    if ROUND:
        total = _rounded(total)
    return total.to(like_ptr.dtype.element_ty)


@triton.jit
def one_shot_kernel(
    input_ptr,
    out_ptr,
    bases_ptr,
    rank,
    numel,
    slot_bytes,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
    ROUND: tl.constexpr,
    SLOTS_AT: tl.constexpr,
    OPERATION_AT: tl.constexpr,
    DONE_AT: tl.constexpr,
):
    """out [numel] = sum of all ranks' input [numel]. bases [WORLD] int64: addresses of their memory."""
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    own = tl.load(bases_ptr + rank)
    operation = tl.load((own + OPERATION_AT).to(tl.pointer_type(tl.int64)))
    slot_at = SLOTS_AT + operation % 2 * slot_bytes
    mine = _slot(own, slot_at, input_ptr)
    for start in range(program * BLOCK, numel, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(mine + at, tl.load(input_ptr + at, mask=at < numel, other=0), mask=at < numel)
    _meet(bases_ptr, program, rank, 2 * operation + 1, WORLD, LANES)
    for start in range(program * BLOCK, numel, step):
        at = start + tl.arange(0, BLOCK)
        total = _sum(bases_ptr, slot_at, at, at < numel, input_ptr, WORLD, WIDEN, ROUND)
        tl.store(out_ptr + at, total, mask=at < numel)
    _end(own, operation, OPERATION_AT, DONE_AT)


@triton.jit
def two_shot_kernel(
    input_ptr,
    out_ptr,
    bases_ptr,
    rank,
    numel,
    part,
    slot_bytes,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
    ROUND: tl.constexpr,
    SLOTS_AT: tl.constexpr,
    OPERATION_AT: tl.constexpr,
    DONE_AT: tl.constexpr,
):
    """As ``one_shot_kernel``; rank r adds up elements [r * part, (r + 1) * part).

    A program takes the same pieces of every part: what it copies is what its partners read. A rank's part of
    its own slot is read by nobody else before the second meeting, so its sum is put there.
    """
    program, step = tl.program_id(0), tl.num_programs(0) * BLOCK
    own = tl.load(bases_ptr + rank)
    operation = tl.load((own + OPERATION_AT).to(tl.pointer_type(tl.int64)))
    slot_at = SLOTS_AT + operation % 2 * slot_bytes
    mine = _slot(own, slot_at, input_ptr)
    for whose in range(WORLD):
        for start in range(program * BLOCK, part, step):
            within = start + tl.arange(0, BLOCK)
            at = whose * part + within
            ok = (within < part) & (at < numel)
            tl.store(mine + at, tl.load(input_ptr + at, mask=ok, other=0), mask=ok)
    _meet(bases_ptr, program, rank, 2 * operation + 1, WORLD, LANES)
    for start in range(program * BLOCK, part, step):
        within = start + tl.arange(0, BLOCK)
        at = rank * part + within
        ok = (within < part) & (at < numel)
        total = _sum(bases_ptr, slot_at, at, ok, input_ptr, WORLD, WIDEN, ROUND)
        tl.store(mine + at, total, mask=ok)
    _meet(bases_ptr, program, rank, 2 * operation + 2, WORLD, LANES)
    for whose in range(WORLD):
        theirs = _slot(tl.load(bases_ptr + whose), slot_at, input_ptr)
        for start in range(program * BLOCK, part, step):
            within = start + tl.arange(0, BLOCK)
            at = whose * part + within
            ok = (within < part) & (at < numel)
            tl.store(out_ptr + at, tl.load(theirs + at, mask=ok, other=0), mask=ok)
    _end(own, operation, OPERATION_AT, DONE_AT)
