"""Adapters in the steps of a worker: puts them into the model's slots, and says which row has which slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace_core.lora import AdapterSlots, LoRARequest
from headrace_core.multimodal import MediaInput
from headrace_core.step import NewRequest

Ints = npt.NDArray[np.int64]

NONE = -1
"""The slot of a row without an adapter."""
EmbedMedia = Callable[[Sequence[MediaInput], str], Sequence[Tensor]]
"""Items, and the digest of the adapter that the towers run with ("": none) -> vectors of each."""


class StepAdapters:
    """The slots of a worker's requests; a :class:`~headrace_engine.execution.requests.RowTable`.

    Args:
        slots: the model's.
        content: what was read of an adapter, by its id; raises LookupError if it is not in memory.
        device: where the model is.
    """

    def __init__(
        self, slots: AdapterSlots, content: Callable[[int], Any], device: torch.device
    ) -> None:
        self._slots = slots
        self._content = content
        self._device = device
        self._slot_of: dict[int, int] = {}
        """By an adapter's id."""
        self._media_digests: dict[int, str] = {}
        """By slot: digest of its adapter, if that changes towers for media."""
        self._rows: dict[int, int] = {}
        """Slots by row of the request table, of requests with an adapter."""
        self._of_tokens: npt.NDArray[np.int32] | None = None
        """[T]; slots of the step's tokens."""
        self._chosen = False

    @property
    def chosen(self) -> bool:
        """True if any row of the coming pass has an adapter."""
        return self._of_tokens is not None

    @property
    def runs_eagerly(self) -> bool:
        """See :attr:`headrace_core.lora.AdapterSlots.runs_eagerly`."""
        return self._slots.runs_eagerly

    def place(self, placed: Mapping[int, LoRARequest]) -> None:
        """Put adapters into slots. One that is not in memory any more was removed, and the requests that it
        was for were aborted, after the step was scheduled: its slot is nobody's then."""
        for slot, request in placed.items():
            self._slot_of = {i: other for i, other in self._slot_of.items() if other != slot}
            try:
                content = self._content(request.lora_int_id)
            except LookupError:
                continue
            self._slots.place(slot, content)
            self._media_digests.pop(slot, None)
            if content.changes_media:
                self._media_digests[slot] = content.digest
            self._slot_of[request.lora_int_id] = slot

    def add(self, row: int, new: NewRequest) -> None:
        """Note a request's slot.

        Raises:
            ValueError: its adapter is in none.
        """
        self._rows.pop(row, None)
        lora = new.request.lora_request
        if lora is None:
            return
        if lora.lora_int_id not in self._slot_of:
            raise ValueError(f"adapter {lora.lora_name!r} is in no slot")
        self._rows[row] = self._slot_of[lora.lora_int_id]

    def remove(self, row: int, request_id: str) -> None:
        """Forget a request."""
        self._rows.pop(row, None)

    def embed(self, due: Sequence[tuple[int, MediaInput]], run: EmbedMedia) -> list[Tensor]:
        """Have items embedded, each with the adapter of its request if that changes towers.

        Args:
            due: row of the request, and item.
        """
        by_slot: dict[int, list[int]] = {}
        for index, (row, _) in enumerate(due):
            slot = self._rows.get(row, NONE)
            by_slot.setdefault(slot if slot in self._media_digests else NONE, []).append(index)
        found: dict[int, Tensor] = {}
        for slot, indices in by_slot.items():
            self.choose_media(None if slot == NONE else slot)
            try:
                made = run([due[i][1] for i in indices], self._media_digests.get(slot, ""))
            finally:
                self.choose_media(None)
            found.update(zip(indices, made, strict=True))
        return [found[index] for index in range(len(due))]

    def choose_media(self, slot: int | None) -> None:
        """See :meth:`headrace_core.lora.AdapterSlots.choose_media`."""
        self._slots.choose_media(slot)

    def choose(self, rows: Ints, token_rows: Ints, logits: Ints | None) -> None:
        """Choose slots for a pass.

        Args:
            rows: [B]; of the request table.
            token_rows: [T]; of each token's request.
            logits: [R]; indices of tokens that logits are computed of. None: all, in order.
        """
        if not self._rows or not any(row in self._rows for row in rows.tolist()):
            self.choose_none()
            return
        by_row = np.full(int(rows.max()) + 1, NONE, np.int32)
        for row in rows.tolist():
            by_row[row] = self._rows.get(row, NONE)
        self._of_tokens = by_row[token_rows]
        self._choose(self._of_tokens, logits)

    def choose_logits(self, tokens: Ints) -> None:
        """Choose for logits of other tokens of the same pass: ``tokens`` [R] are indices."""
        if self._of_tokens is not None:
            self._choose(self._of_tokens, tokens)

    def choose_none(self) -> None:
        """No row of what comes next has an adapter."""
        self._of_tokens = None
        if self._chosen:
            self._slots.choose(None)
            self._chosen = False

    def choose_all(self, num_tokens: int, num_logits: int, slot: int = NONE) -> None:
        """One slot for all rows of made-up passes of up to so many."""
        self._chosen = True
        tokens, logits = (
            torch.full((count,), slot, dtype=torch.int32, device=self._device)
            for count in (num_tokens, num_logits)
        )
        self._slots.choose(tokens, logits)

    def _choose(self, of_tokens: npt.NDArray[np.int32], logits: Ints | None) -> None:
        self._chosen = True
        of_logits = of_tokens if logits is None else of_tokens[logits]
        self._slots.choose(self._tensor(of_tokens), self._tensor(of_logits))

    def _tensor(self, slots: npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(slots).to(self._device)
