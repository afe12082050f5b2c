"""Slots of the rows of a forward pass, at a fixed address; and the slot of media."""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1
"""Slot of a row without an adapter."""


class RowSlots:
    """The slots of a pass's tokens, or of the rows that logits are computed of.

    Args:
        what: the rows are, in plural; for messages.
        most: rows of a pass.
    """

    def __init__(self, what: str, most: int, device: str) -> None:
        self.what = what
        self.memory = torch.full((most,), NONE, dtype=torch.int32, device=device)
        self.count: int | None = None
        """Rows of the coming pass; None: no row has an adapter."""

    def choose(self, slots: Tensor | None) -> None:
        """Take the slots [T] int32 of the coming pass.

        Raises: ValueError: there are more than there is memory for.
        """
        self.count = None if slots is None else int(slots.shape[0])
        if slots is None:
            return
        if len(slots) > len(self.memory):
            raise ValueError(
                f"slots of {len(slots)} {self.what}: at most {len(self.memory)} are kept"
            )
        self.memory[: len(slots)].copy_(slots)

    def of(self, rows: int, name: str) -> Tensor:
        """The slots of so many rows that a layer gets: the whole memory.

        Where slots were chosen for as many rows as there is memory for, a step may be recorded: recordings
        have any number of rows, and the kernel looks at those of each step.

        Raises: RuntimeError: the layer gets other rows than those that slots were chosen for.
        """
        if self.count not in (rows, len(self.memory)):
            raise RuntimeError(
                f"{name} gets {rows} rows, and slots of adapters were chosen for {self.count} {self.what}"
            )
        return self.memory


class MediaSlot(RowSlots):
    """The slot of the media that are embedded next, which is that of all rows of towers and projectors."""

    def __init__(self, device: str) -> None:
        super().__init__("media", 0, device)
        self.slot = NONE

    def choose_slot(self, slot: int | None) -> None:
        """Take the slot; None: the media have no adapter."""
        self.count, self.slot = (None, NONE) if slot is None else (0, slot)
        self.memory = self.memory[:0]

    def of(self, rows: int, name: str) -> Tensor:
        """The slot, for so many rows that a layer gets, or more."""
        if len(self.memory) < rows:
            self.memory = self.memory.new_full((rows,), self.slot)
        return self.memory
