"""Low-rank adapters of an engine with several ranks: what rank 0 does with its slots, the others do, too.

Every rank reads an adapter's files itself, beside the steps, and keeps its own share of the factors: only
numbers and a digest travel. See docs/adr/0131-every-rank-reads-adapters.md.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_core.errors import EngineDead, HeadraceError, WeightsError
from headrace_core.lora import AdapterSlots

if TYPE_CHECKING:
    from torch import Tensor

READ = "read_adapter"
"""Call of the other ranks' workers, which they answer beside the passes."""
PLACE, CHOOSE, CHOOSE_MEDIA, DROP = (
    "place_adapter", "choose_adapters", "choose_media_adapter", "drop_adapters",
)  # fmt: skip
"""What the other ranks are told between passes, in order with them."""


@dataclass(frozen=True, eq=False)
class LedAdapter:
    """What rank 0 read of an adapter that every rank has read."""

    number: int
    """Names this reading among the ranks."""
    content: Any
    """What rank 0's slots read."""

    @property
    def num_bytes(self) -> int:
        """Bytes of rank 0's share."""
        return int(self.content.num_bytes)

    @property
    def digest(self) -> str:
        """Name of the files' content, which is the same on every rank."""
        return str(self.content.digest)

    @property
    def changes_media(self) -> bool:
        """See :meth:`headrace_core.lora.AdapterSlots.read`."""
        return bool(self.content.changes_media)


class LedAdapters:
    """Rank 0's :class:`~headrace_core.lora.AdapterSlots`, which tell the other ranks what they are told.

    The others keep what they read as long as rank 0 does: once nobody here holds an adapter, they are told
    so with the next thing that they are told of adapters.

    Args:
        slots: of rank 0's model.
        tell: tells the other ranks something, in order with passes. The worker's thread only.
        call: calls a method of the other ranks' workers; results by rank from 1. Any thread.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        tell: Callable[..., None],
        call: Callable[[str, Sequence[Any]], list[Future[Any]]],
    ) -> None:
        self._slots = slots
        self._tell = tell
        self._call = call
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()
        """Readings that nobody holds here any more. Finalizers append, in whatever thread."""

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_bytes(self) -> int:
        """See :attr:`headrace_core.lora.AdapterSlots.num_bytes`; of rank 0."""
        return self._slots.num_bytes

    @property
    def runs_eagerly(self) -> bool:
        """See :attr:`headrace_core.lora.AdapterSlots.runs_eagerly`."""
        return self._slots.runs_eagerly

    def read(self, path: str) -> LedAdapter:
        """Read an adapter on every rank, at once; see :meth:`headrace_core.lora.AdapterSlots.read`.

        Raises:
            EngineDead: a rank has ended, or the engine is shut down.
            WeightsError: also if another rank cannot read it, or reads other content; names the rank.
        """
        number = next(self._numbers)
        answers = self._call(READ, (number, os.path.abspath(path), self._take_dropped()))
        try:
            content = self._slots.read(path)
            for rank, answer in enumerate(answers, 1):
                _check_same(path, content.digest, rank, answer)
        except BaseException:
            for answer in answers:  # what a rank reads after it was told to drop it would stay
                answer.exception()
            self._dropped.append(number)
            raise
        adapter = LedAdapter(number, content)
        weakref.finalize(adapter, self._dropped.append, number).atexit = False
        return adapter

    def place(self, slot: int, adapter: LedAdapter) -> None:
        """See :meth:`headrace_core.lora.AdapterSlots.place`."""
        self._tell_dropped()
        self._slots.place(slot, adapter.content)
        self._tell(PLACE, slot, adapter.number)

    def choose(self, tokens: Tensor | None, logits: Tensor | None = None) -> None:
        """See :meth:`headrace_core.lora.AdapterSlots.choose`."""
        self._tell_dropped()
        self._slots.choose(tokens, logits)
        self._tell(CHOOSE, tokens, logits)

    def choose_media(self, slot: int | None) -> None:
        """See :meth:`headrace_core.lora.AdapterSlots.choose_media`."""
        self._slots.choose_media(slot)
        self._tell(CHOOSE_MEDIA, slot)

    def _tell_dropped(self) -> None:
        if self._dropped:
            self._tell(DROP, self._take_dropped())

    def _take_dropped(self) -> list[int]:
        found: list[int] = []
        while self._dropped:
            try:
                found.append(self._dropped.popleft())
            except IndexError:  # another thread has taken it
                break
        return found


class FollowingAdapters:
    """The slots of a rank other than 0, and what it has read for them.

    Args:
        slots: of this rank's model.
    """

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self.chosen = False
        """True if rows of the coming pass have adapters."""
        self._read: dict[int, Any] = {}
        self._told: dict[str, Callable[..., None]] = {
            PLACE: self._place, CHOOSE: self._choose, CHOOSE_MEDIA: slots.choose_media, DROP: self._drop,
        }  # fmt: skip

    @property
    def num_kept(self) -> int:
        """Adapters in this rank's memory."""
        return len(self._read)

    def read(self, number: int, path: str, dropped: Sequence[int]) -> str:
        """Read an adapter and keep it under a number; returns the digest of its content. Any thread.

        Args:
            dropped: numbers of adapters that are needed no more.

        Raises:
            WeightsError, UnsupportedModel: it cannot be used; says why. An error of another class, which
                rank 0 would take for the end of this rank, is a WeightsError, too.
        """
        self._drop(dropped)
        try:
            content = self.slots.read(path)
        except HeadraceError:
            raise
        except Exception as error:
            raise WeightsError(f"{path}: {type(error).__name__}: {error}") from error
        self._read[number] = content
        return str(content.digest)

    def follow(self, what: str, args: Sequence[Any]) -> bool:
        """Do what rank 0 tells; False: it is nothing about adapters."""
        if what not in self._told:
            return False
        self._told[what](*args)
        return True

    def _place(self, slot: int, number: int) -> None:
        self.slots.place(slot, self._read[number])

    def _choose(self, tokens: Tensor | None, logits: Tensor | None) -> None:
        self.chosen = tokens is not None
        self.slots.choose(tokens, logits)

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._read.pop(number, None)


def _check_same(path: str, digest: str, rank: int, answer: Future[Any]) -> None:
    try:
        found = answer.result()
    except EngineDead:
        raise
    except HeadraceError as error:
        raise WeightsError(f"rank {rank} cannot read what rank 0 has read: {error}") from error
    if found != digest:
        raise WeightsError(
            f"{path}: rank {rank} reads other content there (digest {found:.12}) than rank 0 "
            f"({digest:.12}): must be the same files for all ranks, and must not change while they are read"
        )
