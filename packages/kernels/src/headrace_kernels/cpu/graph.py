"""The captured step on a CPU: one native call instead of hundreds from Python.

The step is recorded three times with different sizes and no kernel running
(:mod:`~headrace_kernels.cpu.graph_recording`), which shows which arguments follow from which size
(:mod:`~headrace_kernels.cpu.graph_program`). One recording so serves every number of rows; a bucket
is only how much memory is set aside for intermediate results, and all buckets share it. Replaying
patches row counts and the addresses of the step's inputs: nothing is copied, nothing padded.

**How an op must be written** to be recorded, whoever writes it:

- it computes by calling kernels of its :class:`~headrace_kernels.cpu.library.Library`, and allocates
  by ``torch.empty`` and its like; other operations of torch refuse the capture, but for views;
- which kernels it calls does not depend on sizes, and each integer argument is a constant or a
  constant times a size of the batch (tokens, requests, rows with logits, a block table's width or
  stride, the longest query or context): further arithmetic on sizes belongs into the kernel;
- it reads no tensor's content, and keeps no memory of its own that it may replace later;
- its kernels return None or a status, 0 for success.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.errors import CaptureRefused, ReplayFailed
from headrace_core.graph import GraphNeed, Step, StepGraph
from headrace_kernels.cpu.graph_program import (
    ALIGNMENT,
    NativeProgram,
    Program,
    assemble,
    calls_without,
    generalise,
    place_blocks,
)
from headrace_kernels.cpu.graph_recording import record
from headrace_kernels.cpu.library import Library

# A step's values: sizes, then addresses, then four of each cache group.
TOKENS, SEQS, LOGITS, LONGEST_QUERY, LONGEST_CONTEXT = range(5)
INPUT_IDS, POSITIONS, CU_SEQLENS_Q, SEQ_LENS, LOGITS_ROWS = range(5, 10)
BLOCK_TABLE, TABLE_STRIDE, TABLE_WIDTH, SLOT_MAPPING = range(4)
FIRST_GROUP, GROUP_VALUES = 10, 4

PROBES = ((1031, 127, 1), (257, 31, 1), (67, 13, 1), (5003, 641, 1), (8009, 997, 1))
"""Sizes of the recordings, in the order of the values. Primes, so that a multiple of one is no
multiple of another; far apart, so that rounding up to a power of two shows; down to 1, where an op
would branch. Nothing is computed: large ones cost address space."""
_TABLE_PROBES = ((503, 59, 1), (421, 43, 1))
"""Stride and width of the first group's table; further groups get the next primes."""


class _Bucket(NamedTuple):
    """A program with memory for a number of tokens."""

    num_tokens: int
    num_logits: int
    native: NativeProgram
    pointers: tuple[int, int, int, int, int]
    """Arguments of ``hr_replay`` that stay: calls, count, words, patches, count."""
    logits: Tensor
    """[num_logits, V], in the graph's memory."""


class NativeStepGraph(StepGraph):
    """See :class:`headrace_core.graph.StepGraph`.

    Args:
        library: that of the ops which the step calls.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._clear()

    def _clear(self) -> None:
        self._program: Program | None = None
        self._buckets: tuple[_Bucket, ...] = ()
        self._kept: list[Any] = []
        self._memory = np.zeros(0, np.uint8)
        self._all_rows = torch.zeros(0, dtype=torch.int64)
        self._calls_without_logits: int | None = None
        self._values: Any = None
        self._num_groups = 0

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(bucket.num_tokens for bucket in self._buckets)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def num_calls(self) -> int:
        return 0 if self._program is None else len(self._program.calls)

    def close(self) -> None:
        self._clear()

    # --- capture ------------------------------------------------------------------------------

    def capture(self, step: Step, need: GraphNeed) -> None:
        """See :meth:`headrace_core.graph.StepGraph.capture`."""
        self._clear()
        try:
            self._capture(step, need)
        except CaptureRefused:
            self._clear()
            raise

    def _capture(self, step: Step, need: GraphNeed) -> None:
        values, recordings = [], []
        for size in range(len(PROBES[0])):
            batch = _probe(size, need.num_groups)
            assert batch.logits_rows is not None
            values.append(_values(batch, batch.logits_rows.shape[0], batch.logits_rows.data_ptr()))
            inputs = _inputs(batch)
            recording = record(self._library, inputs, functools.partial(step, batch))
            _check_result(recording.result_shape, batch)
            recordings.append(recording)
            self._kept += recording.kept
        self._program = generalise(
            recordings,
            values,
            sizes=_size_indices(need.num_groups),
            addresses=_address_indices(need.num_groups),
        )
        self._calls_without_logits = calls_without(self._program, frozenset((LOGITS, LOGITS_ROWS)))
        self._num_groups = need.num_groups
        self._all_rows = torch.arange(need.capture_sizes[-1])
        self._values = (ctypes.c_int64 * len(values[0]))()
        self._place(self._program, need)

    def _place(self, program: Program, need: GraphNeed) -> None:
        """Memory for the largest bucket, and every bucket's program in it."""
        plans = []
        for num_tokens in need.capture_sizes:
            seqs = min(num_tokens, need.max_num_seqs)
            limits = {TOKENS: num_tokens, SEQS: seqs, LOGITS: seqs}
            plans.append((num_tokens, seqs, *place_blocks(program, limits)))
        size = max(total for *_, total in plans)
        # Zeroed by the system as it is touched: a bucket costs what its steps use of it.
        self._memory = np.zeros(size + ALIGNMENT, np.uint8)
        skip = -self._memory.ctypes.data % ALIGNMENT
        self._buckets = tuple(
            self._bucket(program, num_tokens, seqs, skip, offsets)
            for num_tokens, seqs, offsets, _ in plans
        )

    def _bucket(
        self, program: Program, num_tokens: int, num_logits: int, skip: int, offsets: Sequence[int]
    ) -> _Bucket:
        native = assemble(program, self._memory.ctypes.data + skip, offsets)
        block, term = program.result.block, program.result.term
        assert block is not None
        assert term is not None
        start = skip + offsets[block] + term.offset
        size = program.result_dtype.itemsize * num_logits * program.result_width
        logits = torch.from_numpy(self._memory[start : start + size]).view(program.result_dtype)
        pointers = (
            native.calls.ctypes.data, len(native.calls), native.words.ctypes.data,
            native.patches.ctypes.data, len(native.patches),
        )  # fmt: skip
        return _Bucket(
            num_tokens, num_logits, native, pointers, logits.view(num_logits, program.result_width)
        )

    # --- replay -------------------------------------------------------------------------------

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        """See :meth:`headrace_core.graph.StepGraph.fits`."""
        bucket = self._bucket_of(batch)
        return (
            bucket is not None
            and _num_logits(batch, num_logits) <= bucket.num_logits
            and len(batch.groups) == self._num_groups
            and not batch.extra
            and _is_well_formed(batch)
        )

    def _bucket_of(self, batch: ForwardBatch) -> _Bucket | None:
        """The smallest that takes the batch's tokens."""
        num_tokens = batch.input_ids.shape[0]
        for bucket in self._buckets:
            if num_tokens <= bucket.num_tokens:
                return bucket
        return None

    def replay(self, batch: ForwardBatch, num_logits: int | None = None) -> Tensor:
        """See :meth:`headrace_core.graph.StepGraph.replay`."""
        bucket, num_logits = self._bucket_of(batch), _num_logits(batch, num_logits)
        assert bucket is not None, "the caller asks fits() first"
        rows = self._all_rows if batch.logits_rows is None else batch.logits_rows
        calls, count, words, patches, num_patches = bucket.pointers
        num_rows = num_logits
        if num_logits == 0:
            if self._calls_without_logits is None:
                num_rows = 1
            else:
                count = self._calls_without_logits
        self._values[:] = _values(batch, num_rows, rows.data_ptr())
        status = ctypes.c_int32()
        done = self._library.replay(
            calls, count, words, patches, num_patches,
            ctypes.addressof(self._values), ctypes.addressof(status),
        )  # fmt: skip
        if done < count:
            assert self._program is not None
            name = self._program.calls[done].kernel.name
            raise ReplayFailed(f"call {done}, {name}, reported status {status.value}")
        return bucket.logits[:num_logits]


def _values(batch: ForwardBatch, num_logits: int, logits_rows: int) -> list[int]:
    """The step's values, in the order of the constants above."""
    values = [
        batch.input_ids.shape[0], batch.seq_lens.shape[0], num_logits,
        batch.max_seqlen_q, batch.max_seqlen_k, batch.input_ids.data_ptr(),
        batch.positions.data_ptr(), batch.cu_seqlens_q.data_ptr(), batch.seq_lens.data_ptr(),
        logits_rows,
    ]  # fmt: skip
    for group in batch.groups:
        table = group.block_table
        stride, _ = table.stride()
        values += (table.data_ptr(), stride, table.shape[1], group.slot_mapping.data_ptr())
    return values


def _is_well_formed(batch: ForwardBatch) -> bool:
    """Whether the tensors are what :class:`ForwardBatch` says: kernels get bare addresses. If not,
    the eager step converts them or says what is wrong."""
    tokens, (seqs,) = batch.input_ids.shape, batch.seq_lens.shape
    rows = batch.logits_rows
    return (
        _is_flat(batch.input_ids, torch.int64, tokens)
        and _is_flat(batch.positions, torch.int64, tokens)
        and _is_flat(batch.cu_seqlens_q, torch.int32, (seqs + 1,))
        and _is_flat(batch.seq_lens, torch.int32, (seqs,))
        and (rows is None or _is_flat(rows, torch.int64, rows.shape))
        and all(
            _is_flat(group.slot_mapping, torch.int64, tokens)
            and group.block_table.dtype is torch.int32
            and group.block_table.shape[0] == seqs
            and group.block_table.stride(1) == 1
            for group in batch.groups
        )
    )


def _is_flat(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return x.dtype is dtype and x.shape == shape and x.is_contiguous()


def _num_logits(batch: ForwardBatch, wanted: int | None) -> int:
    if wanted is not None:
        return wanted
    rows = batch.input_ids if batch.logits_rows is None else batch.logits_rows
    return int(rows.shape[0])


def _check_result(shape: tuple[int, ...], batch: ForwardBatch) -> None:
    if len(shape) != 2 or shape[0] != _num_logits(batch, None):
        raise CaptureRefused(f"the result is {list(shape)}, not [R, V] with R rows of logits")


def _inputs(batch: ForwardBatch) -> list[Tensor]:
    """Tensors of the addresses among the step's values, in their order."""
    assert batch.logits_rows is not None
    inputs = [batch.input_ids, batch.positions, batch.cu_seqlens_q, batch.seq_lens]
    inputs.append(batch.logits_rows)
    for group in batch.groups:
        inputs += [group.block_table, group.slot_mapping]
    return inputs


def _address_indices(num_groups: int) -> list[int]:
    indices = [INPUT_IDS, POSITIONS, CU_SEQLENS_Q, SEQ_LENS, LOGITS_ROWS]
    for group in range(num_groups):
        first = FIRST_GROUP + group * GROUP_VALUES
        indices += [first + BLOCK_TABLE, first + SLOT_MAPPING]
    return indices


def _size_indices(num_groups: int) -> list[int]:
    indices = [TOKENS, SEQS, LOGITS, LONGEST_QUERY, LONGEST_CONTEXT]
    for group in range(num_groups):
        first = FIRST_GROUP + group * GROUP_VALUES
        indices += [first + TABLE_STRIDE, first + TABLE_WIDTH]
    return indices


def _probe(size: int, num_groups: int) -> ForwardBatch:
    """The batch of a recording: only shapes matter. Contents differ from size to size, so that a
    step that read them would give itself away."""
    tokens, seqs, rows, longest_query, longest_context = (probe[size] for probe in PROBES)
    stride, width = (probe[size] for probe in _TABLE_PROBES)
    groups = []
    for _ in range(num_groups):
        table = torch.full((seqs, stride), size, dtype=torch.int32)[:, :width]
        slots = torch.full((tokens,), -1 - size, dtype=torch.int64)
        groups.append(GroupBatch(block_table=table, slot_mapping=slots))
        if size < len(PROBES[0]) - 1:
            stride, width = _next_prime(stride), _next_prime(width)
    return ForwardBatch(
        input_ids=torch.full((tokens,), size, dtype=torch.int64),
        positions=torch.full((tokens,), size, dtype=torch.int64),
        cu_seqlens_q=torch.full((seqs + 1,), size, dtype=torch.int32),
        seq_lens=torch.full((seqs,), size, dtype=torch.int32),
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_context,
        groups=tuple(groups),
        logits_rows=torch.full((rows,), size, dtype=torch.int64),
    )


def _next_prime(number: int) -> int:
    number += 1
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
