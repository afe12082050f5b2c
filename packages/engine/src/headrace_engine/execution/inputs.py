"""From a scheduled step to the flat tensors of one forward pass.

Letters: T tokens in this step, B requests in it, M blocks per table row, R rows with logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.model import INPUT_EMBEDS, MROPE_POSITIONS, SupportsMRoPE
from headrace_engine.execution.media import PendingMedia
from headrace_engine.execution.prompt_table import PromptTable
from headrace_engine.execution.requests import RequestTable
from headrace_engine.speculation.state_turns import StateTurns

Ints = npt.NDArray[np.int64]
NO_DRAFTS: Mapping[str, Sequence[int]] = {}
NOBODY: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows of one request whose next token is a prompt token (prompt log-probabilities)."""

    index: int
    """The request's place in the batch."""
    token_rows: Ints
    """[n]; rows of the flat batch."""
    targets: Ints
    """[n]; the prompt token after each."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step, ready to run."""

    request_ids: list[str]
    """B ids, in batch order."""
    rows: Ints
    """[B]; rows of the request table."""
    seq_lens: Ints
    """[B]; context length including this step's tokens."""
    sampled: Ints
    """Indices (0..B-1) of the requests that get a token: this step completes what is known, and
    nothing is wrong with them."""
    num_logits: int
    """Rows of logits that they get: one each, and one for each guess."""
    prompt_rows: list[PromptRows]
    encodes: list[int]
    """Indices (0..B-1) of the requests whose media this step encodes."""
    batch: ForwardBatch | None
    """None if no request of the step can run. ``logits_rows`` holds the sampled requests' last
    rows, before their guesses and at them, then the prompt rows."""
    errors: dict[str, str]
    """Requests of which nothing comes, and why; what can be computed of them is in the batch."""
    token_rows: Ints
    """[T]; rows of the request table, of each token's request."""
    logits_rows: Ints | None
    """[R]; as those of the batch."""

    @property
    def sampled_rows(self) -> Ints:
        """Rows of the request table that get a token: :attr:`rows` itself if all do."""
        return self.rows if len(self.sampled) == len(self.rows) else self.rows[self.sampled]

    @property
    def sampled_ids(self) -> list[str]:
        """Ids of the requests that get a token: :attr:`request_ids` itself if all do."""
        if len(self.sampled) == len(self.rows):
            return self.request_ids
        return [self.request_ids[b] for b in self.sampled.tolist()]


class _BatchLayout:
    """The requests of a step with their numbers of tokens, and what follows from these alone.

    Args:
        request_ids: B ids, in batch order.
        rows: [B]; their rows of the table, all held.
        counts: [B]; tokens of this step, at least 1 each.
        table: as it is now.
    """

    def __init__(
        self, request_ids: list[str], rows: Ints, counts: Ints, table: RequestTable
    ) -> None:
        self.request_ids, self.rows, self.counts = request_ids, rows, counts
        self.version = table.version
        self.wants_prompt = table.sampling.wants_prompt_logprobs(rows)
        self.most_tokens = int(counts.max()) if len(counts) else 0
        self.cu_seqlens = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=self.cu_seqlens[1:])
        self.decodes = self.most_tokens == 1
        self.token_rows = rows if self.decodes else np.repeat(rows, counts)
        """[T]; row of the request that each token belongs to."""
        self._cu_seqlens_int32 = self.cu_seqlens.astype(np.int32)
        # A request's first token is at cu_seqlens[b] and at position computed[b].
        self._steps = np.arange(self.cu_seqlens[-1])

    def positions(self, computed: Ints) -> Ints:
        """[T], from [B] numbers of computed tokens."""
        if self.decodes:
            return computed
        return self._steps + np.repeat(computed - self.cu_seqlens[:-1], self.counts)

    def cu_seqlens_tensor(self, device: torch.device) -> Tensor:
        return _tensor(self._cu_seqlens_int32, device)

    def without(self, bad: npt.NDArray[np.bool_], table: RequestTable) -> _BatchLayout:
        good = ~bad
        ids = [self.request_ids[b] for b in np.flatnonzero(good)]
        return _BatchLayout(ids, self.rows[good], self.counts[good], table)


class InputBuilder:
    """Gathers the inputs of one step after the other.

    Who takes part is looked up by id only if it has changed since the step before: while the same
    requests decode, a step is a few operations on arrays.

    Args:
        table: the requests; not changed.
        block_size: tokens per cache block.
        device: where the tensors go.
        token_types: True if the model takes segments.
        mrope: see :class:`PromptTable`.
    """

    def __init__(
        self,
        table: RequestTable,
        *,
        block_size: int,
        device: torch.device,
        token_types: bool = False,
        mrope: SupportsMRoPE | None = None,
    ) -> None:
        self.prompts = PromptTable(device, mrope)
        """Parts of prompts beside token ids, by the table's rows."""
        self.media = PendingMedia(table)
        """Media that are still to be encoded or embedded."""
        self.turns: StateTurns | None = None
        """Where states are, if guesses are checked beside them."""
        table.follow(self.prompts, self.media)
        self._table = table
        self._takes_token_types = token_types
        self._block_size = block_size
        self._device = device
        self._ids: list[str] = []
        self._counts: list[int] = []
        self._layout = _BatchLayout([], np.zeros(0, np.int64), np.zeros(0, np.int64), table)

    def build(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]] = NO_DRAFTS,
        behind: Mapping[str, int] = NOBODY,
    ) -> StepInputs:
        """A step's inputs.

        Args:
            scheduled: number of tokens by request id, in batch order.
            drafts: guesses that are computed besides, of requests whose tokens are complete.
            behind: tokens that are computed again before them
                (:mod:`~headrace_engine.speculation.state_turns`).
        """
        table = self._table
        counts = list(scheduled.values())
        if drafts or behind:
            counts = [n + len(drafts.get(i, ())) + behind.get(i, 0) for i, n in scheduled.items()]
        layout, errors = self._look_up(list(scheduled), counts)
        computed, seq_lens, known = self._lengths(layout)
        lacking = self._lacking(layout, seq_lens, known)
        if lacking.any():
            names = [layout.request_ids[b] for b in np.flatnonzero(lacking)]
            errors = errors | {name: self._why_not(name, scheduled[name]) for name in names}
            layout = layout.without(lacking, table)
            computed, seq_lens, known = self._lengths(layout)
        rows = layout.rows
        if not len(rows):
            return StepInputs([], rows, rows, rows, 0, [], [], None, errors, rows, None)
        positions = layout.positions(computed)
        sampled = np.flatnonzero(seq_lens == known)
        prompt_rows = _prompt_rows(table, layout, computed, seq_lens)
        failing = self._failing(rows) if table.failures else []
        if failing:
            errors = errors | {layout.request_ids[b]: table.failures[int(rows[b])] for b in failing}
            sampled = np.setdiff1d(sampled, failing)
            prompt_rows = [part for part in prompt_rows if part.index not in failing]
        longest, device = int(seq_lens.max()), self._device
        ends = 1 + table.num_drafts[rows[sampled]]
        logits_rows = _logits_rows(layout.cu_seqlens, sampled, ends, prompt_rows)
        # Nearly all requests bring nothing but tokens: then nothing is asked of the tables.
        waiting = self.media.to_encode
        encodes = [b for b, row in enumerate(rows.tolist()) if row in waiting] if waiting else []
        prompts = self.prompts
        embeds = prompts.input_embeds(rows, computed, layout.cu_seqlens) if prompts.spans else None
        key_lens = prompts.key_lens(rows, seq_lens) if prompts.num_attended else None
        last_keys = None
        if prompts.whole_spans:
            last_keys = prompts.last_keys(rows, computed, layout.cu_seqlens, positions)
        places, axes = positions, None
        if prompts.axes:
            places, axes = prompts.places(rows, computed, layout.cu_seqlens, positions)
        extra: dict[str, Any] = {} if embeds is None else {INPUT_EMBEDS: embeds}
        if axes is not None:
            extra[MROPE_POSITIONS] = _tensor(axes, device)
        batch = ForwardBatch(
            input_ids=_tensor(
                table.token_ids[layout.token_rows, positions].astype(np.int64), device
            ),
            positions=_tensor(places, device),
            cu_seqlens_q=layout.cu_seqlens_tensor(device),
            seq_lens=_tensor(seq_lens.astype(np.int32), device),
            max_seqlen_q=layout.most_tokens,
            max_seqlen_k=longest,
            groups=self._groups(layout, positions, computed, seq_lens, encodes),
            logits_rows=None if logits_rows is None else _tensor(logits_rows, device),
            token_type_ids=(
                prompts.token_type_ids(rows, computed, layout.cu_seqlens)
                if self._takes_token_types
                else None
            ),
            key_lens=None if key_lens is None else _tensor(key_lens, device),
            last_keys=None if last_keys is None else _tensor(last_keys, device),
            extra=extra,
        )
        return StepInputs(
            layout.request_ids,
            rows,
            seq_lens,
            sampled,
            int(ends.sum()),
            prompt_rows,
            encodes,
            batch,
            errors,
            layout.token_rows,
            logits_rows,
        )

    def _look_up(self, ids: list[str], counts: list[int]) -> tuple[_BatchLayout, dict[str, str]]:
        """Those whose tokens the table holds, and what is wrong with the others."""
        table, layout = self._table, self._layout
        if layout.version == table.version and ids == self._ids and counts == self._counts:
            return layout, {}
        found, errors = [], {}
        for request_id, count in zip(ids, counts):
            row = table.row_of.get(request_id, -1)
            if row < 0 or count < 1 or row in table.broken:
                errors[request_id] = self._why_not(request_id, count)
            else:
                found.append((request_id, row, count))
        names, rows, numbers = zip(*found) if found else ((), (), ())
        layout = _BatchLayout(
            list(names), np.array(rows, np.int64), np.array(numbers, np.int64), table
        )
        if not errors:
            self._layout, self._ids, self._counts = layout, ids, counts
        return layout, errors

    def _failing(self, rows: Ints) -> list[int]:
        """Indices of the requests of which nothing comes."""
        return [b for b, row in enumerate(rows.tolist()) if row in self._table.failures]

    def _lengths(self, layout: _BatchLayout) -> tuple[Ints, Ints, Ints]:
        """[B] each: tokens before this step, with it, and known or guessed."""
        table, rows = self._table, layout.rows
        computed = table.num_computed_tokens[rows]
        return computed, computed + layout.counts, table.num_tokens[rows] + table.num_drafts[rows]

    def _lacking(self, layout: _BatchLayout, seq_lens: Ints, known: Ints) -> npt.NDArray[np.bool_]:
        """[B]; whose tokens are not known, or have no blocks."""
        lacking: npt.NDArray[np.bool_] = seq_lens > known
        table = self._table
        for group, num_blocks in enumerate(table.num_blocks):
            needed = seq_lens
            if group in table.cross_groups:
                needed = table.num_encoder_tokens[layout.rows]
            lacking |= needed > num_blocks[layout.rows] * self._block_size
        return lacking

    def _why_not(self, request_id: str, count: int) -> str:
        table = self._table
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
            f"{self._block_size} tokens that the request holds"
        )

    def _groups(
        self,
        layout: _BatchLayout,
        positions: Ints,
        computed: Ints,
        seq_lens: Ints,
        encodes: list[int],
    ) -> tuple[GroupBatch, ...]:
        if not self._table.block_tables:
            return ()  # the model caches nothing
        size, device = self._block_size, self._device
        num_blocks = -(-int(seq_lens.max()) // size)
        columns = positions // size
        offsets = positions - columns * size
        groups = []
        for group, blocks in enumerate(self._table.block_tables):
            if group in self._table.cross_groups:
                groups.append(self._cross_group(blocks, layout.rows, encodes))
                continue
            if group in self._table.state_groups:
                groups.append(self._state_group(group, layout.rows, computed, seq_lens))
                continue
            slots = blocks[layout.token_rows, columns].astype(np.int64)
            slots *= size
            slots += offsets
            groups.append(
                GroupBatch(
                    block_table=_tensor(blocks[:, :num_blocks][layout.rows], device),
                    slot_mapping=_tensor(slots, device),
                )
            )
        return tuple(groups)

    def _cross_group(
        self, blocks: npt.NDArray[np.int32], rows: Ints, encodes: list[int]
    ) -> GroupBatch:
        """A group whose keys and values are encoder states: written once, read in every step."""
        size, device, lengths = self._block_size, self._device, self._table.num_encoder_tokens[rows]
        longest = int(lengths.max())
        new = lengths[encodes]
        positions = np.concatenate([np.arange(0), *(np.arange(length) for length in new)])
        slots = blocks[np.repeat(rows[encodes], new), positions // size].astype(np.int64)
        slots = slots * size + positions % size
        return GroupBatch(
            block_table=_tensor(blocks[:, : max(1, -(-longest // size))][rows], device),
            slot_mapping=_tensor(slots, device),
            seq_lens=_tensor(lengths.astype(np.int32), device),
            max_seqlen_k=longest,
        )

    def _state_group(self, group: int, rows: Ints, computed: Ints, seq_lens: Ints) -> GroupBatch:
        """A group whose blocks hold a state each: the entry of the last token before the step is read,
        that of the step's last token written."""
        device, size = self._device, self._block_size
        blocks = self._table.block_tables[group]
        if self.turns is not None:
            before, after = self.turns.places(group, rows, computed)
        else:
            before = blocks[rows, np.maximum(computed - 1, 0) // size].astype(np.int64)
            before[computed == 0] = -1
            after = blocks[rows, (seq_lens - 1) // size].astype(np.int64)
        return GroupBatch(
            block_table=torch.zeros((len(rows), 0), dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
            state_in=_tensor(before, device),
            state_out=_tensor(after, device),
        )


def _prompt_rows(
    table: RequestTable, layout: _BatchLayout, computed: Ints, seq_lens: Ints
) -> list[PromptRows]:
    found, cu_seqlens = [], layout.cu_seqlens
    for b in layout.wants_prompt:
        row, first = int(layout.rows[b]), int(computed[b])
        last = min(int(seq_lens[b]), int(table.num_prompt_tokens[row]) - 1)
        if last > first:
            token_rows = np.arange(cu_seqlens[b], cu_seqlens[b] + last - first)
            targets = table.token_ids[row, first + 1 : last + 1].astype(np.int64)
            found.append(PromptRows(int(b), token_rows, targets))
    return found


def _logits_rows(
    cu_seqlens: Ints, sampled: Ints, ends: Ints, prompt_rows: list[PromptRows]
) -> Ints | None:
    """``ends``: so many rows of each sampled request, its last ones."""
    num_tokens = int(cu_seqlens[-1])
    if int(ends.sum()) == num_tokens and not prompt_rows:
        return None  # every request decodes: all rows, in order
    last = cu_seqlens[sampled + 1] - 1
    if len(last) < int(ends.sum()):
        steps = np.arange(int(ends.sum())) - np.repeat(np.cumsum(ends), ends) + 1
        last = np.repeat(last, ends) + steps
    parts = [last, *(part.token_rows for part in prompt_rows)]
    wanted = np.concatenate(parts)
    if not wanted.size:
        # Nothing is wanted of this step; one row anyway, as no kernel need accept zero rows.
        wanted = np.array([num_tokens - 1])
    return wanted


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
