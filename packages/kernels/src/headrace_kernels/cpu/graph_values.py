"""Inputs of a captured step from its batch: sizes and addresses, in one order.

A program knows a batch as a list of numbers, its *values*. Those of every batch come first, then the
rows with logits, token types and two to five of each cache group, as far as the need has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.graph import GraphNeed

Ints = npt.NDArray[np.int64]

TOKENS, SEQS = 0, 1
INPUT_IDS, POSITIONS, CU_SEQLENS_Q, SEQ_LENS = 4, 5, 6, 7
LOGITS, LOGITS_ROWS = 8, 9
"""Indices of the values of steps with rows of logits."""

PROBES = ((1031, 127, 1), (257, 31, 1), (67, 13, 1), (5003, 641, 1), (8009, 997, 1))
"""Sizes of the recordings: tokens, requests, rows with logits, longest query, longest context. Primes,
so that a multiple of one is no multiple of another; far apart, so that rounding up to a power of two
shows; down to 1, where an op would branch. Nothing is computed: large ones cost address space."""
_TABLE_PROBES = ((503, 59, 1), (421, 43, 1))
"""Stride and width of the first group's table; further groups get the next primes."""
_STATES_PROBE = (3001, 353, 1)
"""Most encoder states of the first group of cross-attention; further ones get the next primes."""

NUM_PROBES = len(PROBES[0])


def entries(
    batch: ForwardBatch, need: GraphNeed, num_logits: int, rows: Tensor | None
) -> list[int | Tensor]:
    """The values of a batch that is as the need says, tensors for their addresses.

    Args:
        num_logits, rows: how many of which rows have logits; not of steps of all rows.
    """
    values: list[int | Tensor] = [
        batch.input_ids.shape[0], batch.seq_lens.shape[0], batch.max_seqlen_q, batch.max_seqlen_k,
        batch.input_ids, batch.positions, batch.cu_seqlens_q, batch.seq_lens,
    ]  # fmt: skip
    if rows is not None:
        values += (num_logits, rows)
    if need.token_types:
        assert batch.token_type_ids is not None
        values.append(batch.token_type_ids)
    for index, group in enumerate(batch.groups):
        if index in need.state_groups:
            assert group.state_in is not None
            assert group.state_out is not None
            values += (group.state_in, group.state_out)
            continue
        table = group.block_table
        values += (table, table.stride(0), table.shape[1])
        if index in need.cross_groups:
            assert group.seq_lens is not None
            values += (group.seq_lens, group.max_seqlen_k)
        else:
            values.append(group.slot_mapping)
    return values


def numbers(values: Sequence[int | Tensor]) -> list[int]:
    """Tensors replaced by their addresses."""
    return [x if isinstance(x, int) else x.data_ptr() for x in values]


class PartsValues(NamedTuple):
    """Values of a batch's parts."""

    values: Ints
    """[parts, values]."""
    num_rows: Ints
    """[parts]; of each one's result."""
    kept: tuple[Ints | npt.NDArray[np.int32], ...]
    """Arrays whose addresses are among the values."""


def parts_values(
    batch: ForwardBatch, need: GraphNeed, cuts: Sequence[int], rows: Tensor
) -> PartsValues:
    """The values of each part of a batch without cache groups: addresses within the batch's tensors,
    but where numbers count from a part's first token.

    Args:
        cuts: see :meth:`headrace_core.graph.StepGraph.replay_parts`.
        rows: with logits, one of each request; not looked at in steps of all rows.
    """
    bounds, cu_seqlens = np.array(cuts), batch.cu_seqlens_q.numpy()
    seqs, starts = np.diff(bounds), cu_seqlens[bounds[:-1]].astype(np.int64)
    whole = numbers(entries(batch, need, 0, None if need.all_rows else rows))
    values = np.tile(np.array(whole, np.int64), (len(seqs), 1))
    values[:, TOKENS], values[:, SEQS] = np.diff(cu_seqlens[bounds]), seqs
    for entry in (INPUT_IDS, POSITIONS, *((len(whole) - 1,) if need.token_types else ())):
        values[:, entry] += starts * 8
    values[:, SEQ_LENS] += bounds[:-1] * 4
    # Each part's running sums have one entry more than requests: 0 1 2, 2 3, 3 4 5 for cuts 0 2 3 5.
    entry_of = np.arange(bounds[-1] + len(seqs)) - np.repeat(np.arange(len(seqs)), seqs + 1)
    sums = (cu_seqlens[entry_of] - np.repeat(starts, seqs + 1)).astype(np.int32)
    values[:, CU_SEQLENS_Q] = sums.ctypes.data + 4 * (bounds[:-1] + np.arange(len(seqs)))
    if need.all_rows:
        return PartsValues(values, values[:, TOKENS], (sums,))
    own_rows = rows.numpy() - np.repeat(starts, seqs)
    values[:, LOGITS] = seqs
    values[:, LOGITS_ROWS] = own_rows.ctypes.data + 8 * bounds[:-1]
    return PartsValues(values, seqs, (sums, own_rows))


def is_as_needed(batch: ForwardBatch, need: GraphNeed) -> bool:
    """True if the batch has what was captured, nothing more, and its tensors are what
    :class:`ForwardBatch` says: kernels get bare addresses. If not, the eager step converts them or
    says what is wrong."""
    tokens, (seqs,) = batch.input_ids.shape, batch.seq_lens.shape
    rows, types = batch.logits_rows, batch.token_type_ids
    return (
        len(batch.groups) == need.num_groups
        and not batch.extra
        and batch.encoder_states is None
        and batch.key_lens is None
        and batch.last_keys is None
        and (rows is None or (not need.all_rows and _is_flat(rows, torch.int64, rows.shape)))
        and (types is not None) == need.token_types
        and (types is None or _is_flat(types, torch.int64, tokens))
        and _is_flat(batch.input_ids, torch.int64, tokens)
        and _is_flat(batch.positions, torch.int64, tokens)
        and _is_flat(batch.cu_seqlens_q, torch.int32, (seqs + 1,))
        and _is_flat(batch.seq_lens, torch.int32, (seqs,))
        and all(
            _is_states(group, seqs)
            if index in need.state_groups
            else group.block_table.dtype is torch.int32
            and group.block_table.shape[0] == seqs
            and group.block_table.stride(1) == 1
            and (_is_cross(group, seqs) if index in need.cross_groups else _is_own(group, tokens))
            for index, group in enumerate(batch.groups)
        )
    )


def _is_states(group: GroupBatch, seqs: int) -> bool:
    places = (group.state_in, group.state_out)
    return all(x is not None and _is_flat(x, torch.int64, (seqs,)) for x in places)


def _is_own(group: GroupBatch, tokens: tuple[int, ...]) -> bool:
    alone = group.seq_lens is None and group.state_in is None
    return alone and _is_flat(group.slot_mapping, torch.int64, tokens)


def _is_cross(group: GroupBatch, seqs: int) -> bool:
    """True if the group is of cross-attention and nothing is to be written."""
    lengths = group.seq_lens
    written = group.slot_mapping.shape[0] > 0
    return lengths is not None and not written and _is_flat(lengths, torch.int32, (seqs,))


def _is_flat(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return x.dtype is dtype and x.shape == shape and x.is_contiguous()


def probe(size: int, need: GraphNeed, least: int = 1) -> ForwardBatch:
    """The batch of a recording: only shapes matter. Contents differ from size to size, so that a
    step that read them would give itself away.

    Args:
        least: no size is below it.
    """
    sizes = (max(least, each[size]) for each in PROBES)
    tokens, seqs, rows, longest_query, longest_context = sizes
    ids = torch.full((tokens,), size, dtype=torch.int64)
    return ForwardBatch(
        input_ids=ids,
        positions=ids.clone(),
        cu_seqlens_q=torch.full((seqs + 1,), size, dtype=torch.int32),
        seq_lens=torch.full((seqs,), size, dtype=torch.int32),
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_context,
        groups=tuple(_probe_groups(size, need, tokens, seqs, least)),
        logits_rows=None if need.all_rows else torch.full((rows,), size, dtype=torch.int64),
        token_type_ids=ids.clone() if need.token_types else None,
    )


def _probe_groups(
    size: int, need: GraphNeed, tokens: int, seqs: int, least: int
) -> list[GroupBatch]:
    stride, width = (max(least, each[size]) for each in _TABLE_PROBES)
    states = max(least, _STATES_PROBE[size])
    groups = []
    for index in range(need.num_groups):
        if index in need.state_groups:
            groups.append(_probe_states(size, seqs))
            continue
        table = torch.full((seqs, stride), size, dtype=torch.int32)[:, :width]
        if index in need.cross_groups:
            lengths = torch.full((seqs,), size, dtype=torch.int32)
            nothing = torch.zeros(0, dtype=torch.int64)
            groups.append(GroupBatch(table, nothing, lengths, states))
            states = _next(states)
        else:
            groups.append(GroupBatch(table, torch.full((tokens,), -1 - size, dtype=torch.int64)))
        stride, width = _next(stride), _next(width)
    return groups


def _probe_states(size: int, seqs: int) -> GroupBatch:
    places = torch.full((seqs,), size, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    table = torch.zeros((seqs, 0), dtype=torch.int32)
    return GroupBatch(table, nothing, state_in=places, state_out=places.clone())


def _next(size: int) -> int:
    """The next prime; a size of 1 stays."""
    if size == 1:
        return 1
    size += 1
    while any(size % divisor == 0 for divisor in range(2, int(size**0.5) + 1)):
        size += 1
    return size
