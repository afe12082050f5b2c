"""The captured step on a CPU: one native call instead of hundreds from Python.

The step is recorded three times with different sizes and no kernel running
(:mod:`~headrace_kernels.cpu.graph_recording`), which shows which arguments follow from which size
(:mod:`~headrace_kernels.cpu.graph_program`). One recording so serves every number of rows; a bucket
is only how much memory is set aside for intermediate results, and all buckets share it. Replaying
patches row counts and the addresses of the step's inputs (:mod:`~headrace_kernels.cpu.graph_values`):
nothing is copied, nothing padded.

**How an op must be written** to be recorded, whoever writes it:

- it computes by calling kernels of its :class:`~headrace_kernels.cpu.library.Library`, and allocates
  by ``torch.empty`` and its like; of torch's operations it may use views, and those whose bits are
  fixed (:mod:`~headrace_kernels.cpu.graph_torch`): others refuse the capture;
- which kernels it calls does not depend on sizes, and each integer argument is a constant or a
  constant times a size of the batch (tokens, requests, rows with logits, a block table's width or
  stride, the longest query or context, most encoder states): further arithmetic on sizes belongs
  into the kernel;
- it reads no tensor's content, and keeps no memory of its own that it may replace later;
- its kernels return None or a status, 0 for success.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import CaptureRefused, ReplayFailed
from headrace_core.graph import GraphNeed, Step, StepGraph
from headrace_kernels.cpu.graph_parts import MOST_LANES, PartsProgram
from headrace_kernels.cpu.graph_program import (
    ALIGNMENT,
    NativeProgram,
    Program,
    assemble,
    calls_without,
    check_single,
    generalise,
    place_blocks,
    result_is_apart,
)
from headrace_kernels.cpu.graph_recording import Recording, record
from headrace_kernels.cpu.graph_values import (
    LOGITS,
    LOGITS_ROWS,
    NUM_PROBES,
    SEQS,
    TOKENS,
    entries,
    is_as_needed,
    numbers,
    parts_values,
    probe,
)
from headrace_kernels.cpu.library import Library


class _Bucket(NamedTuple):
    """A program with memory for a number of tokens."""

    num_tokens: int
    num_rows: int
    """Most rows of the result."""
    native: NativeProgram
    pointers: tuple[int, int, int, int, int]
    """Arguments of ``hr_replay`` that stay: calls, count, words, patches, count."""
    result: Tensor
    """[num_rows, V], in the graph's memory."""


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
        self._ends = 0
        self._need = GraphNeed((), 0, 0)
        self._parts: PartsProgram | None = None

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(bucket.num_tokens for bucket in self._buckets)

    @property
    def num_bytes(self) -> int:
        results = 0 if self._parts is None else self._parts.results.nbytes
        return self._memory.nbytes + results

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
        probed, recordings, least = [], [], 1
        constants: dict[Any, Tensor] = {}
        self._kept.append(constants)
        for size in range(NUM_PROBES):
            values, recording = self._record(step, need, probe(size, need, least), constants)
            probed.append(values)
            recordings.append(recording)
            self._kept += recording.kept
            if recording.computes_by_torch:
                least = 2  # of one row torch makes no copy, as it has any layout
        if least > 1:
            _, single = self._record(step, need, probe(NUM_PROBES - 1, need), constants)
            check_single(single, recordings[0])
        self._program = generalise(
            recordings,
            [numbers(values) for values in probed],
            sizes=[i for i, x in enumerate(probed[0]) if isinstance(x, int)],
            addresses=[i for i, x in enumerate(probed[0]) if isinstance(x, Tensor)],
        )
        if not need.all_rows:
            depends = frozenset((LOGITS, LOGITS_ROWS))
            self._calls_without_logits = calls_without(self._program, depends)
        self._need = need
        self._all_rows = torch.arange(need.capture_sizes[-1])
        self._values = (ctypes.c_int64 * len(probed[0]))()
        self._place(self._program, need)

    def _record(
        self, step: Step, need: GraphNeed, batch: ForwardBatch, constants: dict[Any, Tensor]
    ) -> tuple[list[int | Tensor], Recording]:
        """A batch's values, and what the step does with it."""
        values = entries(batch, need, _num_rows(batch, None), batch.logits_rows)
        inputs = [x for x in values if isinstance(x, Tensor)]
        run = functools.partial(step, batch)
        recording = record(self._library, inputs, run, constants, need.recorders)
        _check_result(recording.result_shape, batch)
        return values, recording

    def _place(self, program: Program, need: GraphNeed) -> None:
        """Memory for the largest bucket, and every bucket's program in it."""
        plans = []
        for num_tokens in need.capture_sizes:
            seqs = min(num_tokens, need.max_num_seqs)
            limits = {TOKENS: num_tokens, SEQS: seqs}
            if not need.all_rows:
                limits[LOGITS] = seqs
            num_rows = num_tokens if need.all_rows else seqs
            plans.append((num_tokens, num_rows, *place_blocks(program, limits)))
        self._parts = self._in_parts(program, need)
        size = max(total for *_, total in plans)
        if self._parts is not None:
            size = max(size, self._parts.num_bytes)
        # Zeroed by the system as it is touched: a bucket costs what its steps use of it.
        self._memory = np.zeros(size + ALIGNMENT, np.uint8)
        skip = -self._memory.ctypes.data % ALIGNMENT
        if self._parts is not None:  # in the buckets' memory: a step is run in one way or the other
            self._parts.place(self._memory.ctypes.data + skip)
        self._buckets = tuple(
            self._bucket(program, num_tokens, num_rows, skip, offsets)
            for num_tokens, num_rows, offsets, _ in plans
        )

    def _in_parts(self, program: Program, need: GraphNeed) -> PartsProgram | None:
        """The program for parts of steps, None if there are to be none or their results would mingle.

        Nor if others make calls in it: what ranks say to each other has one order.
        """
        lanes = min(self._library.num_threads(), MOST_LANES)
        rows = TOKENS if need.all_rows else LOGITS
        wanted = need.parts and not need.recorders
        if not wanted or lanes < 2 or not result_is_apart(program, rows):
            return None
        num_tokens = need.capture_sizes[-1]
        seqs = min(num_tokens, need.max_num_seqs)
        limits = {TOKENS: -(-num_tokens // lanes), SEQS: seqs}
        if not need.all_rows:
            limits[LOGITS] = seqs
        return PartsProgram(
            program,
            limits,
            num_values=len(self._values),
            num_rows=num_tokens if need.all_rows else seqs,
            num_lanes=lanes,
        )

    def _bucket(
        self, program: Program, num_tokens: int, num_rows: int, skip: int, offsets: Sequence[int]
    ) -> _Bucket:
        native = assemble(program, self._memory.ctypes.data + skip, offsets)
        block, term = program.result.block, program.result.term
        assert block is not None
        assert term is not None
        start = skip + offsets[block] + term.offset
        size = program.result_dtype.itemsize * num_rows * program.result_width
        result = torch.from_numpy(self._memory[start : start + size]).view(program.result_dtype)
        pointers = (
            native.calls.ctypes.data, len(native.calls), native.words.ctypes.data,
            native.patches.ctypes.data, len(native.patches),
        )  # fmt: skip
        return _Bucket(
            num_tokens, num_rows, native, pointers, result.view(num_rows, program.result_width)
        )

    # --- replay -------------------------------------------------------------------------------

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        """See :meth:`headrace_core.graph.StepGraph.fits`."""
        bucket = self._bucket_of(batch)
        return (
            bucket is not None
            and _num_rows(batch, num_logits) <= bucket.num_rows
            and not (self._need.all_rows and num_logits is not None)
            and is_as_needed(batch, self._need)
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
        bucket, num_logits = self._bucket_of(batch), _num_rows(batch, num_logits)
        assert bucket is not None, "the caller asks fits() first"
        rows = self._all_rows if batch.logits_rows is None else batch.logits_rows
        calls, count, words, patches, num_patches = bucket.pointers
        num_rows = num_logits
        if num_logits == 0:
            if self._calls_without_logits is None:
                num_rows = 1
            else:
                count = self._calls_without_logits
        need = self._need
        values = entries(batch, need, num_rows, None if need.all_rows else rows)
        self._values[:] = numbers(values)
        status = ctypes.c_int32()
        done = self._library.replay(
            calls, count, words, patches, num_patches,
            ctypes.addressof(self._values), ctypes.addressof(status), self._ends,
        )  # fmt: skip
        if done < count:
            assert self._program is not None
            name = self._program.calls[done].kernel.name
            raise ReplayFailed(f"call {done}, {name}, reported status {status.value}")
        return bucket.result[:num_logits]

    def call_times(self, batch: ForwardBatch) -> list[tuple[str, int]]:
        """Replay a step; its kernels in order, and the nanoseconds that each call took."""
        assert self._program is not None
        ends = np.zeros(len(self._program.calls) + 1, np.int64)
        self._ends = ends.ctypes.data
        try:
            self.replay(batch)
        finally:
            self._ends = 0
        names = [call.kernel.name for call in self._program.calls]
        return list(zip(names, np.diff(ends).tolist()))

    @property
    def lanes(self) -> int:
        return 1 if self._parts is None else self._parts.num_lanes

    @property
    def part_tokens(self) -> int:
        return 0 if self._parts is None else -(-self.buckets[-1] // self._parts.num_lanes)

    def replay_parts(
        self, batch: ForwardBatch, cuts: Sequence[int], meanwhile: Callable[[], None]
    ) -> Tensor:
        """See :meth:`headrace_core.graph.StepGraph.replay_parts`."""
        if self._parts is None:
            return super().replay_parts(batch, cuts, meanwhile)
        rows = self._all_rows if batch.logits_rows is None else batch.logits_rows
        values = parts_values(batch, self._need, cuts, rows)
        longest = int(values.values[:, TOKENS].max())
        if longest > self.part_tokens:
            raise ValueError(f"a part of {longest} tokens: at most {self.part_tokens} fit its lane")
        return self._parts.run(self._library, values, meanwhile)


def _num_rows(batch: ForwardBatch, wanted: int | None) -> int:
    """Rows of the step's result."""
    if wanted is not None:
        return wanted
    rows = batch.input_ids if batch.logits_rows is None else batch.logits_rows
    return int(rows.shape[0])


def _check_result(shape: tuple[int, ...], batch: ForwardBatch) -> None:
    if len(shape) == 2 and shape[0] == _num_rows(batch, None):
        return
    wanted = "[T, H] of all tokens" if batch.logits_rows is None else "[R, V] with R rows of logits"
    raise CaptureRefused(f"the result is {list(shape)}, not {wanted}")
