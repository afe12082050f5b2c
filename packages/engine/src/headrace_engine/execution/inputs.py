"""From a scheduled step to the flat tensors of one forward pass.

Letters: T tokens in this step, B requests in it, M blocks per table row, R rows with logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_engine.execution.requests import RequestTable

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of one request whose next token is a prompt token (prompt log-probabilities)."""

    index: int
    """Of the request in the batch."""
    token_rows: Ints
    """[n]; rows of the flat batch."""
    targets: Ints
    """[n]; the prompt token after each."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step, ready to run."""

    request_ids: list[str]
    """B ids, in batch order; those in ``errors`` are left out."""
    rows: Ints
    """[B]; rows of the request table."""
    num_new_tokens: Ints
    """[B]."""
    sampled: Ints
    """Indices (0..B-1) of the requests that get a token: this step completes what is known."""
    prompt_rows: list[PromptRows]
    batch: ForwardBatch | None
    """None if no request of the step can run. ``logits_rows`` holds the sampled requests' last
    rows, then the prompt rows."""
    errors: dict[str, str]
    """Requests that cannot run, and why."""


def prepare_inputs(
    scheduled: Mapping[str, int],
    table: RequestTable,
    *,
    block_size: int,
    device: torch.device,
) -> StepInputs:
    """Gather a step's inputs.

    Args:
        scheduled: number of tokens by request id, in batch order.
        table: the requests; not changed.
        block_size: tokens per cache block.
        device: where the tensors go.
    """
    request_ids, rows, counts, errors = _runnable(scheduled, table, block_size)
    if not request_ids:
        return StepInputs([], rows, counts, rows, [], None, errors)
    computed = table.num_computed_tokens[rows]
    seq_lens = computed + counts
    cu_seqlens = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=cu_seqlens[1:])

    # The first token of each request is at cu_seqlens[b] and at position computed[b].
    token_rows = np.repeat(rows, counts)
    positions = np.arange(cu_seqlens[-1]) + np.repeat(computed - cu_seqlens[:-1], counts)
    input_ids = table.token_ids[token_rows, positions].astype(np.int64)

    sampled = np.flatnonzero(seq_lens == table.num_tokens[rows])
    prompt_rows = _prompt_rows(table, rows, computed, seq_lens, cu_seqlens)
    batch = ForwardBatch(
        input_ids=_tensor(input_ids, device),
        positions=_tensor(positions, device),
        cu_seqlens_q=_tensor(cu_seqlens.astype(np.int32), device),
        seq_lens=_tensor(seq_lens.astype(np.int32), device),
        max_seqlen_q=int(counts.max()),
        max_seqlen_k=int(seq_lens.max()),
        groups=_groups(table, rows, token_rows, positions, int(seq_lens.max()), block_size, device),
        logits_rows=_logits_rows(cu_seqlens, sampled, prompt_rows, device),
    )
    return StepInputs(request_ids, rows, counts, sampled, prompt_rows, batch, errors)


def _runnable(
    scheduled: Mapping[str, int], table: RequestTable, block_size: int
) -> tuple[list[str], Ints, Ints, dict[str, str]]:
    """Ids, rows and counts of the requests that can run; reasons for the others."""
    ids = list(scheduled)
    row_of = table.row_of
    rows = np.fromiter((row_of.get(i, -1) for i in ids), np.int64, len(ids))
    counts = np.fromiter(scheduled.values(), np.int64, len(ids))
    ends = table.num_computed_tokens[rows] + counts
    bad = (rows < 0) | (ends > table.num_tokens[rows]) | (counts < 1)
    bad |= (ends > table.num_blocks[:, rows] * block_size).any(axis=0)
    if table.failures:
        bad |= np.isin(rows, list(table.failures))
    if not bad.any():
        return ids, rows, counts, {}
    errors = {
        ids[b]: _why_not(ids[b], int(counts[b]), table, block_size) for b in np.flatnonzero(bad)
    }
    good = ~bad
    return [ids[b] for b in np.flatnonzero(good)], rows[good], counts[good], errors


def _why_not(request_id: str, count: int, table: RequestTable, block_size: int) -> str:
    row = table.row_of.get(request_id)
    if row is None:
        return f"request {request_id!r} is not held by the worker"
    if row in table.failures:
        return table.failures[row]
    computed, known = int(table.num_computed_tokens[row]), int(table.num_tokens[row])
    if count < 1 or computed + count > known:
        return (
            f"{count} tokens were scheduled after {computed} computed ones, "
            f"but {known} tokens are known"
        )
    blocks = table.num_blocks[:, row].tolist()
    return (
        f"{computed + count} tokens do not fit into the {blocks} blocks (by group) of "
        f"{block_size} tokens that the request holds"
    )


def _groups(
    table: RequestTable,
    rows: Ints,
    token_rows: Ints,
    positions: Ints,
    max_seq_len: int,
    block_size: int,
    device: torch.device,
) -> tuple[GroupBatch, ...]:
    num_blocks = -(-max_seq_len // block_size)
    columns = positions // block_size
    offsets = positions - columns * block_size
    groups = []
    for blocks in table.block_tables:
        slots = blocks[token_rows, columns].astype(np.int64)
        slots *= block_size
        slots += offsets
        groups.append(
            GroupBatch(
                block_table=_tensor(blocks[:, :num_blocks][rows], device),
                slot_mapping=_tensor(slots, device),
            )
        )
    return tuple(groups)


def _prompt_rows(
    table: RequestTable, rows: Ints, computed: Ints, seq_lens: Ints, cu_seqlens: Ints
) -> list[PromptRows]:
    wanted = table.sampling.wants_prompt_logprobs(rows)
    found = []
    for b in wanted:
        row, first = int(rows[b]), int(computed[b])
        last = min(int(seq_lens[b]), int(table.num_prompt_tokens[row]) - 1)
        if last > first:
            token_rows = np.arange(cu_seqlens[b], cu_seqlens[b] + last - first)
            targets = table.token_ids[row, first + 1 : last + 1].astype(np.int64)
            found.append(PromptRows(int(b), token_rows, targets))
    return found


def _logits_rows(
    cu_seqlens: Ints, sampled: Ints, prompt_rows: list[PromptRows], device: torch.device
) -> Tensor | None:
    num_tokens = int(cu_seqlens[-1])
    if len(sampled) == num_tokens and not prompt_rows:
        return None  # every request decodes one token: all rows, in order
    parts = [cu_seqlens[sampled + 1] - 1, *(part.token_rows for part in prompt_rows)]
    wanted = np.concatenate(parts)
    if not wanted.size:
        # Nothing is wanted of this step; one row anyway, as no kernel need accept zero rows.
        wanted = np.array([num_tokens - 1])
    return _tensor(wanted, device)


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
