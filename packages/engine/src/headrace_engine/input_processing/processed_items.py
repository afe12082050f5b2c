"""Processed media items, kept for whoever brings them again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.multimodal import (
    MediaItem,
    MediaPlacement,
    MediaProcessor,
    Modality,
    ProcessedMedia,
)


class NotKept(Exception):
    """An item without content is not kept any more."""


class ProcessedItems:
    """A :class:`headrace_core.multimodal.MediaProcessor` that processes an item once. Thread-safe.

    An item is known by its ``content_hash``, which covers its options.

    Args:
        processor: processes what is not kept.
        max_bytes: of the inputs that are kept; 0: none are.
    """

    def __init__(self, processor: MediaProcessor, max_bytes: int) -> None:
        self._processor, self._max_bytes = processor, max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, ProcessedMedia] = OrderedDict()
        self._num_bytes = 0
        self.num_processed = 0
        """Items that the processor was called with."""

    def modalities(self) -> Sequence[Modality]:
        return self._processor.modalities()

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """See :meth:`headrace_core.multimodal.MediaProcessor.process`; an item whose ``data`` is None must be
        kept.

        Raises:
            NotKept: such a one is not.
        """
        with self._lock:
            found = {item.content_hash: self._kept.get(item.content_hash) for item in items}
        missing = {item.content_hash: item for item in items if found[item.content_hash] is None}
        if any(item.data is None for item in missing.values()):
            raise NotKept
        made = self._processor.process(list(missing.values()), options) if missing else []
        found.update(zip(missing, made, strict=True))
        with self._lock:
            self.num_processed += len(made)
            for name, one in found.items():
                assert one is not None
                self._keep(name, one)
        return [one for item in items if (one := found[item.content_hash]) is not None]

    def keeps(self, content_hash: str) -> bool:
        """True if an item's processed form is kept, at this moment."""
        with self._lock:
            return content_hash in self._kept

    def keep(self, content_hash: str, made: ProcessedMedia) -> None:
        """Keep an item that was processed elsewhere."""
        with self._lock:
            self._keep(content_hash, made)

    def _keep(self, name: str, one: ProcessedMedia) -> None:
        if name in self._kept:
            self._kept.move_to_end(name)
            return
        size = _num_bytes(one)
        if size > self._max_bytes:
            return
        self._kept[name] = one
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        return self._processor.largest(modality, sizes)

    def placeholder(self, modality: Modality, index: int) -> str:
        return self._processor.placeholder(modality, index)

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        return self._processor.place(token_ids, media)


def _num_bytes(one: ProcessedMedia) -> int:
    return sum(len(array.data) for array in one.inputs.values())
