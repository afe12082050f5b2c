"""Media of requests on their way to the engine's process through shared memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from headrace_core.multimodal import MediaInput
from headrace_core.request import CoreRequest
from headrace_engine.shared_objects.object_storage import SingleWriterShmObjectStorage
from headrace_engine.shared_objects.ring_buffer import RingHandle, SingleWriterShmRingBuffer


class SharedItem(NamedTuple):
    """The place of an item's inputs in shared memory."""

    request: int
    """Index of the request in the message."""
    item: int
    """Index in the request's media."""
    address: int
    chunk_id: int


class SharedItems:
    """A front end's shared memory. Thread-safe.

    Args:
        num_bytes: of the memory, which is taken as it is used.
        max_object_size: bytes of an item; larger ones go with the request.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, num_bytes: int, max_object_size: int) -> None:
        self.max_object_size = max_object_size
        ring = SingleWriterShmRingBuffer.create(num_bytes)
        self._storage = SingleWriterShmObjectStorage(max_object_size, 1, ring)
        self._lock = threading.Lock()
        self.num_written = 0
        """Items that were copied into the memory."""

    def handle(self) -> RingHandle:
        """For :class:`ReceivedItems`."""
        return self._storage.handle()

    def moved(self, requests: Sequence[CoreRequest]) -> tuple[list[CoreRequest], list[SharedItem]]:
        """Requests without the inputs of their media, and where those are. What finds no room stays."""
        found: list[SharedItem] = []
        left = [self._request(index, request, found) for index, request in enumerate(requests)]
        return left, found

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        with self._lock:
            self._storage.close()

    def _request(self, index: int, request: CoreRequest, found: list[SharedItem]) -> CoreRequest:
        media = list(request.media)
        for place, item in enumerate(media):
            stored = self._stored(item)
            if stored is not None:
                found.append(SharedItem(index, place, *stored))
                media[place] = replace(item, inputs={})
        return replace(request, media=media) if request.media else request

    def _stored(self, item: MediaInput) -> tuple[int, int] | None:
        """Address and id of an item, written if it is not there; None: it has no room or no name."""
        key = item.content_hash
        if not key:
            return None
        with self._lock:
            if self._storage.is_cached(key):
                return self._storage.get_cached(key)
            try:
                stored = self._storage.put(key, item.inputs)
            except (MemoryError, ValueError):
                return None
            self.num_written += 1
            return stored


class ReceivedItems:
    """A front end's shared memory, in the engine's process.

    Args:
        handle: as the front end gave it.
        max_object_size: the front end's.

    Raises:
        OSError: the front end has gone.
    """

    def __init__(self, handle: RingHandle, max_object_size: int) -> None:
        ring = SingleWriterShmRingBuffer.open(handle)
        self._storage = SingleWriterShmObjectStorage(max_object_size, 1, ring, threading.Lock())

    def restored(
        self, requests: Sequence[CoreRequest], items: Sequence[SharedItem]
    ) -> list[CoreRequest]:
        """Requests with the inputs of all their media.

        Raises:
            ValueError: an item is not where it should be.
        """
        found = list(requests)
        for item in items:
            media = list(found[item.request].media)
            inputs = self._storage.get(item.address, item.chunk_id)
            media[item.item] = replace(media[item.item], inputs=inputs)
            found[item.request] = replace(found[item.request], media=media)
        return found

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._storage.close()
