"""Named objects in a ring of shared memory: each is written once, however often it is handed out.

An object is a count of its readings, 4 bytes; the size of a description, 4 bytes; the description; and its
data. The writer counts how often it hands an object out, readers count in the ring how often they have read
one: it makes room for others when all have read it as often as it was handed out. The oldest goes first.
Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager

import msgspec

from headrace_core.arrays import PackedArray
from headrace_engine.shared_objects.ring_buffer import HEADER, RingHandle, SingleWriterShmRingBuffer

Arrays = Mapping[str, PackedArray]
_COUNT = struct.Struct("=I")
_FRONT = struct.Struct("=II")
_MOST_COUNTS = 1 << 32


class _Description(msgspec.Struct, array_like=True):
    """An array without its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


_read_descriptions = msgspec.msgpack.Decoder(list[_Description])


class _Handed(msgspec.Struct):
    address: int
    chunk_id: int
    number: int
    """Times that it was handed out."""


class SingleWriterShmObjectStorage:
    """The writer's or a reader's end of a storage of arrays by name. A writer uses it from one thread.

    Args:
        max_object_size: bytes of an object, with its description.
        n_readers: each of which reads what is handed out.
        ring_buffer: its memory.
        reader_lock: held by all readers while one counts; writers need none.

    Raises:
        ValueError: a reader has no lock.
    """

    def __init__(
        self,
        max_object_size: int,
        n_readers: int,
        ring_buffer: SingleWriterShmRingBuffer,
        reader_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        if not ring_buffer.is_writer and reader_lock is None:
            raise ValueError("reader_lock: a reader must have one")
        self.max_object_size, self._num_readers = max_object_size, n_readers
        self._ring, self._lock = ring_buffer, reader_lock
        self._handed: dict[str, _Handed] = {}
        self._keys: dict[int, str] = {}

    def put(self, key: str, value: Arrays) -> tuple[int, int]:
        """Write an object and hand it out. Objects that all have read make room, the oldest first.

        Returns:
            Its address and id, for :meth:`get`.

        Raises:
            ValueError: it is larger than ``max_object_size``, or the key is there.
            MemoryError: there is no room.
        """
        if key in self._handed:
            raise ValueError(f"key = {key!r}: is there already")
        told = msgspec.msgpack.encode(
            [_Description(name, a.dtype, a.shape, len(a.data)) for name, a in value.items()]
        )
        size = _FRONT.size + len(told) + sum(len(array.data) for array in value.values())
        if size > self.max_object_size:
            raise ValueError(f"{size} bytes: must be at most {self.max_object_size}")
        address, chunk_id = self._room(size)
        with self._ring.access_buf(address) as (payload, _, _):
            _FRONT.pack_into(payload, 0, 0, len(told))
            end = _FRONT.size
            for part in (told, *(array.data for array in value.values())):
                payload[end : end + len(part)] = part
                end += len(part)
        self._handed[key], self._keys[chunk_id] = _Handed(address, chunk_id, 1), key
        return address, chunk_id

    def is_cached(self, key: str) -> bool:
        """True if an object is there. Writers only."""
        return key in self._handed

    def get_cached(self, key: str) -> tuple[int, int]:
        """Hand an object out again: its address and id. Writers only.

        Raises:
            KeyError: it is not there.
        """
        handed = self._handed[key]
        self.touch(key)
        return handed.address, handed.chunk_id

    def touch(self, key: str, address: int = 0, monotonic_id: int = 0) -> None:
        """Count an object once more: as handed out, for a writer; as read, for a reader, who names it by its
        address and id.

        Raises:
            KeyError: a writer has none of that key.
            ValueError: there is another object at a reader's address by now.
        """
        if self._ring.is_writer:
            self._handed[key].number += 1
            return
        with self._ring.access_buf(address) as (payload, chunk_id, _):
            _check_id(chunk_id, monotonic_id)
            self._count(payload)

    def get(self, address: int, monotonic_id: int) -> dict[str, PackedArray]:
        """Read an object, which is copied, and count that. Readers only.

        Raises:
            ValueError: there is another object at that address by now, or it is damaged.
        """
        with self._ring.access_buf(address) as (payload, chunk_id, _):
            _check_id(chunk_id, monotonic_id)
            found = _read(payload)
            self._count(payload)
        return found

    def free_unused(self) -> None:
        """Free the oldest objects, up to the first that is still to be read. Writers only."""
        self._forget(self._ring.free_buf(self._is_read))

    def clear(self) -> None:
        """Free all objects, whoever is to read them. Writers only."""
        self._ring.clear()
        self._handed.clear()
        self._keys.clear()

    def handle(self) -> RingHandle:
        """For a reader's ring."""
        return self._ring.handle()

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._ring.close()

    def _room(self, size: int) -> tuple[int, int]:
        while True:
            try:
                return self._ring.allocate_buf(size)
            except MemoryError:
                freed = self._ring.free_buf(self._is_read, size + HEADER)
                self._forget(freed)
                if not freed:
                    raise

    def _forget(self, chunk_ids: list[int]) -> None:
        for chunk_id in chunk_ids:
            del self._handed[self._keys.pop(chunk_id)]

    def _is_read(self, chunk_id: int, payload: memoryview) -> bool:
        """True if all readers have read an object as often as it was handed out."""
        [readings] = _COUNT.unpack_from(payload)
        due = self._handed[self._keys[chunk_id]].number * self._num_readers
        return bool(readings == due % _MOST_COUNTS)

    def _count(self, payload: memoryview) -> None:
        assert self._lock is not None
        with self._lock:
            [readings] = _COUNT.unpack_from(payload)
            _COUNT.pack_into(payload, 0, (readings + 1) % _MOST_COUNTS)


def _check_id(found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"id = {wanted}: its address has been used again, for {found}")


def _read(payload: memoryview) -> dict[str, PackedArray]:
    """An object's arrays, copied.

    Raises:
        ValueError: it is damaged.
    """
    _, size = _FRONT.unpack_from(payload)
    end = _FRONT.size + size
    found: dict[str, PackedArray] = {}
    for told in _read_descriptions.decode(payload[_FRONT.size : end]):
        data = bytes(payload[end : end + told.num_bytes])
        end += told.num_bytes
        found[told.name] = PackedArray(told.dtype, told.shape, data)
    return found
