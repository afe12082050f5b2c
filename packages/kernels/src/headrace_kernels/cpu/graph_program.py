"""From recordings of several sizes to a program for any size.

The same step, recorded with different sizes, differs in nothing but arguments that follow from the
sizes. An argument that is k times one of the step's sizes in every recording is that in general; one
that is the same in every recording is constant; anything else refuses the capture. Nobody has to
say which arguments count rows, and an operation that branches on sizes is found out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace_core.errors import CaptureRefused
from headrace_kernels.cpu.graph_recording import MemoryEvent, RecordedCall, Recording, Word
from headrace_kernels.cpu.graph_torch import CODE_AT, COPY, OPERATIONS
from headrace_kernels.cpu.library import Kernel

Ints = npt.NDArray[np.int64]

ALIGNMENT = 64
"""Bytes; of blocks of memory."""


class Term(NamedTuple):
    """``values[value] * factor + offset``; a constant if ``value`` is None."""

    value: int | None
    factor: int
    offset: int

    def at(self, values: Sequence[int]) -> int:
        return self.offset + (0 if self.value is None else values[self.value] * self.factor)


class Argument(NamedTuple):
    """One argument of a call: a term, or an offset into a block, or a floating-point constant."""

    term: Term | None = None
    block: int | None = None
    real: float | None = None


class Call(NamedTuple):
    kernel: Kernel
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A step of any size."""

    calls: tuple[Call, ...]
    sizes: tuple[Term, ...]
    """Bytes of each block."""
    events: tuple[MemoryEvent, ...]
    """When blocks come and go: those whose lives do not overlap may share memory."""
    result: Argument
    result_width: int
    result_dtype: torch.dtype


def generalise(
    recordings: Sequence[Recording],
    values: Sequence[Sequence[int]],
    *,
    sizes: Sequence[int],
    addresses: Sequence[int],
) -> Program:
    """The program of which all recordings are instances.

    Args:
        recordings: of the same step in different sizes, the first the largest.
        values: of each recording; a size must not be a multiple of another in all of them.
        sizes: indices of the values that are sizes.
        addresses: indices of the values that are addresses of the recordings' inputs, in order.

    Raises:
        CaptureRefused: they are not of one program.
    """
    known = _Sizes(values, sizes)
    first = recordings[0]
    names = [[call.kernel.name for call in recording.calls] for recording in recordings]
    if any(other != names[0] for other in names):
        raise CaptureRefused(f"which kernels run depends on the step's size: {_difference(names)}")
    calls = tuple(
        _call([recording.calls[i] for recording in recordings], known, addresses)
        for i in range(len(first.calls))
    )
    blocks = [_block_sizes(recording.events) for recording in recordings]
    if any(len(other) != len(blocks[0]) for other in blocks):
        raise CaptureRefused("how much memory is allocated depends on the step's size")
    terms = (known.explain(found, "a block of memory") for found in zip(*blocks))
    result = _argument([r.result for r in recordings], known, addresses, "the result")
    width, dtype = first.result_shape[-1], first.result_dtype
    return Program(calls, tuple(terms), tuple(first.events), result, width, dtype)


def check_single(single: Recording, whole: Recording) -> None:
    """Compare a recording of single rows, in which torch leaves out copies, with one of many.

    Raises:
        CaptureRefused: it does something else.
    """
    names = [[what for what in map(_what, each.calls) if what != OPERATIONS[COPY]]
             for each in (whole, single)]  # fmt: skip
    if names[0] != names[1]:
        raise CaptureRefused(f"a single row is computed in another way: {_difference(names)}")


def _what(call: RecordedCall) -> str:
    """The kernel, or the operation of torch for which it stands."""
    name = call.kernel.name
    return OPERATIONS[int(call.words[CODE_AT].value)] if name == "elementwise" else name


class _Sizes:
    """Explains numbers by the sizes of the recordings that they come from."""

    def __init__(self, values: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        self._columns = {j: tuple(each[j] for each in values) for j in sizes}

    def explain(self, found: Sequence[int], what: str) -> Term:
        if all(number == found[0] for number in found):
            return Term(None, 0, int(found[0]))
        for j, column in self._columns.items():
            factor = int(found[0]) // column[0]
            if factor and all(n == factor * size for n, size in zip(found, column)):
                return Term(j, factor, 0)
        raise CaptureRefused(f"{what} is {list(found)} in steps of different sizes")


def _call(calls: Sequence[RecordedCall], known: _Sizes, addresses: Sequence[int]) -> Call:
    kernel = calls[0].kernel
    arguments = tuple(
        _argument(words, known, addresses, f"argument {i} of {kernel.name}")
        for i, words in enumerate(zip(*(call.words for call in calls)))
    )
    return Call(kernel, arguments)


def _argument(
    words: Sequence[Word], known: _Sizes, addresses: Sequence[int], what: str
) -> Argument:
    word = words[0]
    if any((other.base, other.which) != (word.base, word.which) for other in words):
        raise CaptureRefused(f"{what} lies elsewhere in steps of different sizes")
    if isinstance(word.value, float):
        if any(other.value != word.value for other in words):
            raise CaptureRefused(f"{what} is a fraction that depends on the step's size")
        return Argument(real=word.value)
    found = [int(other.value) for other in words]
    if word.base == "":
        return Argument(known.explain(found, what))
    if any(number != found[0] for number in found):
        raise CaptureRefused(f"{what} begins at a row that depends on the step's size")
    if word.base == "memory":
        return Argument(Term(None, 0, found[0]), block=word.which)
    return Argument(Term(addresses[word.which], 1, found[0]))


def _difference(names: Sequence[Sequence[str]]) -> str:
    for found in zip(*names):
        if len(set(found)) > 1:
            return " or ".join(sorted(set(found)))
    return " or ".join(f"{len(found)} calls" for found in names)


def _block_sizes(events: Sequence[MemoryEvent]) -> list[int]:
    return [event.num_bytes for event in events if event.num_bytes >= 0]


def place_blocks(
    program: Program, values: Mapping[int, int], *, without: int | None = None
) -> tuple[list[int], int]:
    """Offsets of the program's blocks for sizes up to ``values``, and the bytes of all together.

    First fit in the order of allocation, over the gaps that released blocks leave.

    Args:
        without: a block that lies elsewhere.
    """
    sizes = [_capacity(term, values) for term in program.sizes]
    offsets = [0] * len(sizes)
    living: list[tuple[int, int]] = []  # (start, end), sorted
    total = 0
    for block, num_bytes in program.events:
        if block == without:
            continue
        span = (offsets[block], offsets[block] + sizes[block])
        if num_bytes < 0:
            living.remove(span)
            continue
        start = 0
        for other_start, other_end in living:
            if start + sizes[block] <= other_start:
                break
            start = max(start, other_end)
        offsets[block] = start
        total = max(total, start + sizes[block])
        living.append((start, start + sizes[block]))
        living.sort()
    return offsets, total


def _capacity(term: Term, values: Mapping[int, int]) -> int:
    if term.value is not None and term.value not in values:
        raise CaptureRefused("a block of memory grows with what has no limit")
    size = term.offset + (0 if term.value is None else term.factor * values[term.value])
    return -(-max(1, size) // ALIGNMENT) * ALIGNMENT


class NativeProgram(NamedTuple):
    """A program as native/src/replay.cpp reads it."""

    calls: Ints
    """[calls, 2]: address of the kernel, index of its first word."""
    words: Ints
    patches: Ints
    """[patches, 4]: word, value, factor, offset."""


def assemble(
    program: Program, memory: int, offsets: Sequence[int], *, result_value: int | None = None
) -> NativeProgram:
    """The program with its blocks at ``memory + offsets``.

    Args:
        result_value: the value that says where the result's block is; None: it lies with the others.
    """
    calls: list[tuple[int, int]] = []
    words: list[int] = []
    patches: list[tuple[int, int, int, int]] = []
    for kernel, arguments in program.calls:
        calls.append((kernel.packed, len(words)))
        for argument in arguments:
            term = argument.term
            if term is not None and term.value is not None:
                patches.append((len(words), term.value, term.factor, term.offset))
            elif term is not None and result_value is not None and _is_of_result(argument, program):
                patches.append((len(words), result_value, 1, term.offset))
            words.append(_constant(argument, memory, offsets))
    return NativeProgram(
        np.array(calls, np.int64).reshape(-1, 2),
        np.array(words, np.int64),
        np.array(patches, np.int64).reshape(-1, 4),
    )


def _is_of_result(argument: Argument, program: Program) -> bool:
    return argument.block is not None and argument.block == program.result.block


def result_is_apart(program: Program, rows: int) -> bool:
    """True if the result is a block of its own, with nothing but one row after the other.

    Args:
        rows: the value that counts them.
    """
    block, term = program.result.block, program.result.term
    if block is None or term is None or term.offset:
        return False
    row_bytes = program.result_width * program.result_dtype.itemsize
    return program.sizes[block] == Term(rows, row_bytes, 0)


def _constant(argument: Argument, memory: int, offsets: Sequence[int]) -> int:
    """The word of an argument; 0 if it is patched."""
    if argument.term is None:
        return int(np.float64(argument.real).view(np.int64))
    if argument.term.value is not None:
        return 0
    base = 0 if argument.block is None else memory + offsets[argument.block]
    return base + argument.term.offset


def calls_without(program: Program, values: frozenset[int]) -> int | None:
    """Number of calls before those that depend on ``values``; None if they mingle."""
    depends = [
        any(a.term is not None and a.term.value in values for a in call.arguments)
        for call in program.calls
    ]
    first = depends.index(True) if True in depends else len(depends)
    return first if all(depends[first:]) else None
