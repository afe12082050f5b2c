"""A step in parts, side by side: one thread runs a part from the first call to the last.

The other way is that all threads share each call's work and meet after it, dozens of times in a step;
each time they wait for the slowest. Parts share nothing but weights. A *lane* is memory for one part's
intermediate results and an instance of the program whose words point there; whoever takes a part takes a
free lane for it. Only the result's block lies elsewhere: each part writes its rows of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_core.errors import ReplayFailed
from headrace_kernels.cpu.graph_program import (
    ALIGNMENT,
    NativeProgram,
    Program,
    assemble,
    place_blocks,
)
from headrace_kernels.cpu.graph_values import PartsValues
from headrace_kernels.cpu.library import Library

MOST_LANES = 64
"""Bits of the word in which native/src/replay.cpp keeps the free ones."""


class PartsProgram:
    """A program for parts of a step.

    Args:
        program: whose result is apart (:func:`~headrace_kernels.cpu.graph_program.result_is_apart`).
        limits: largest sizes of a part, by index of the value.
        num_values: of a batch; the place of a part's result comes after them.
        num_rows: most rows of all parts' results together.
        num_lanes: at most :data:`MOST_LANES`.
    """

    def __init__(
        self,
        program: Program,
        limits: Mapping[int, int],
        *,
        num_values: int,
        num_rows: int,
        num_lanes: int,
    ) -> None:
        self.num_lanes = num_lanes
        self._program = program
        self._num_values = num_values
        self._offsets, size = place_blocks(program, limits, without=program.result.block)
        self._lane_bytes = -(-size // ALIGNMENT) * ALIGNMENT
        shape = (2, num_rows, program.result_width)
        self.results = torch.empty(shape, dtype=program.result_dtype)
        """[2, rows, width]; taken in turn: one is still read while the next is written."""
        self._turn = 0
        self._lanes: list[NativeProgram] = []
        self._words = np.zeros(0, np.int64)

    @property
    def num_bytes(self) -> int:
        """Memory that the lanes need, not counting :attr:`results`."""
        return self._lane_bytes * self.num_lanes

    def place(self, memory: int) -> None:
        """Let the lanes lie at an address; nobody else may use the memory during :meth:`run`."""
        self._lanes = [
            assemble(
                self._program,
                memory + lane * self._lane_bytes,
                self._offsets,
                result_value=self._num_values,
            )
            for lane in range(self.num_lanes)
        ]
        self._words = np.array([lane.words.ctypes.data for lane in self._lanes], np.int64)

    def run(self, library: Library, parts: PartsValues, meanwhile: Callable[[], None]) -> Tensor:
        """The parts' results, one after the other.

        Args:
            meanwhile: called while other threads compute already.

        Raises:
            ReplayFailed: a kernel met bad input.
        """
        ends = np.cumsum(parts.num_rows)
        self._turn = 1 - self._turn
        result = self.results[self._turn]
        row_bytes = result.stride(0) * result.element_size()
        addresses = result.data_ptr() + row_bytes * (ends - parts.num_rows)
        values = np.column_stack((parts.values, addresses))
        done, status = np.zeros(len(values), np.int64), np.zeros(len(values), np.int32)
        calls, patches = self._lanes[0].calls, self._lanes[0].patches
        library.replay_parts(
            meanwhile, _address(calls), len(calls), _address(self._words), self.num_lanes,
            _address(patches), len(patches), _address(values), values.shape[1], len(values),
            _address(done), _address(status),
        )  # fmt: skip
        for part in np.flatnonzero(done < len(calls)).tolist():
            name = self._program.calls[done[part]].kernel.name
            raise ReplayFailed(
                f"part {part}, call {done[part]}, {name}, reported status {status[part]}"
            )
        return result[: ends[-1]]


def _address(array: Any) -> int:
    return int(array.ctypes.data)
