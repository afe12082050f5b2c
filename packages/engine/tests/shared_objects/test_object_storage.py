"""Objects in a ring of shared memory: against a dictionary, and when processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.arrays import PackedArray
from headrace_engine.shared_objects.object_storage import SingleWriterShmObjectStorage
from headrace_engine.shared_objects.ring_buffer import RingHandle, SingleWriterShmRingBuffer

Address = tuple[int, int]


def arrays(seed: int, size: int) -> dict[str, PackedArray]:
    data = bytes((seed + i) % 256 for i in range(size))
    return {
        "pixels": PackedArray("uint8", (size,), data),
        "grid": PackedArray("uint8", (1, 0), b""),
    }


class World:
    """A writer and readers in one process."""

    def __init__(self, size: int, largest: int, readers: int = 1) -> None:
        self.ring = SingleWriterShmRingBuffer.create(size)
        self.writer = SingleWriterShmObjectStorage(largest, readers, self.ring)
        lock, handle = threading.Lock(), self.writer.handle()
        self.readers = [
            SingleWriterShmObjectStorage(
                largest, readers, SingleWriterShmRingBuffer.open(handle), lock
            )
            for _ in range(readers)
        ]

    def close(self) -> None:
        for each in (self.writer, *self.readers):
            each.close()


@pytest.fixture
def world() -> Iterator[Any]:
    made: list[World] = []

    def make(*args: int) -> World:
        made.append(World(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_order_of_operations_is_that_of_a_dictionary(data: st.DataObject) -> None:
    """Two readers read what they are handed, late and in turn; nothing that is due is ever lost."""
    world = World(data.draw(st.sampled_from([1024, 2048, 4096])), 700, 2)
    kept: dict[str, tuple[dict[str, PackedArray], Address]] = {}
    due: list[list[tuple[str, Address]]] = [[], []]
    try:
        for step in range(100):
            action = data.draw(st.sampled_from(["put", "put", "again", "read", "read", "free"]))
            if action == "put":
                value = arrays(step, data.draw(st.integers(0, 720)))
                try:
                    address = world.writer.put(f"k{step}", value)
                except ValueError:  # larger than 700 with its description
                    assert value["pixels"].shape[0] > 640
                    continue
                except MemoryError:
                    assert any(due), "an empty ring has room"
                    continue
                kept[f"k{step}"] = (value, address)
                for queue in due:
                    queue.append((f"k{step}", address))
            elif action == "again" and kept:
                key = data.draw(st.sampled_from(sorted(kept)))
                if world.writer.is_cached(key):
                    assert world.writer.get_cached(key) == kept[key][1]
                    for queue in due:
                        queue.append((key, kept[key][1]))
            elif action == "read":
                index = data.draw(st.integers(0, 1))
                if due[index]:
                    key, address = due[index].pop(0)
                    assert world.readers[index].get(*address) == kept[key][0]
            else:
                world.writer.free_unused()
            waiting = {key for queue in due for key, _ in queue}
            assert all(world.writer.is_cached(key) for key in waiting)
    finally:
        world.close()


def test_the_oldest_goes_first_and_what_is_due_stays(world: Any) -> None:
    made = world(1024, 400)
    first = made.writer.put("a", arrays(1, 300))
    second = made.writer.put("b", arrays(2, 300))
    with pytest.raises(MemoryError, match="no contiguous room"):
        made.writer.put("c", arrays(3, 300))
    made.readers[0].get(*second)
    with pytest.raises(MemoryError):  # the oldest is still due
        made.writer.put("c", arrays(3, 300))
    made.readers[0].get(*first)
    third = made.writer.put("c", arrays(3, 300))
    assert [made.writer.is_cached(key) for key in "abc"] == [False, True, True]
    assert made.readers[0].get(*third) == arrays(3, 300)
    with pytest.raises(ValueError, match="used again"):
        made.readers[0].get(*first)


def test_a_gap_at_the_end_and_a_ring_as_large_as_its_object(world: Any) -> None:
    made = world(1024, 1016)
    for seed, size in enumerate((600, 600, 900, 100, 900)):
        address = made.writer.put(f"k{seed}", arrays(seed, size))
        assert made.readers[0].get(*address) == arrays(seed, size)
    assert made.ring.data_buffer_end > 2 * made.ring.size


def test_ids_begin_again(world: Any) -> None:
    made = world(1024, 300)
    made.ring.monotonic_id_start = made.ring.monotonic_id_end = (1 << 32) - 2
    found = [made.writer.put(f"k{i}", arrays(i, 100)) for i in range(4)]
    assert [chunk_id for _, chunk_id in found] == [(1 << 32) - 2, (1 << 32) - 1, 0, 1]
    for i, address in enumerate(found):
        assert made.readers[0].get(*address) == arrays(i, 100)
    made.writer.free_unused()
    assert not any(made.writer.is_cached(f"k{i}") for i in range(4))


def test_misuse_is_named(world: Any) -> None:
    made = world(1024, 300)
    address, chunk_id = made.writer.put("a", arrays(1, 10))
    with pytest.raises(ValueError, match="'a': is there already"):
        made.writer.put("a", arrays(1, 10))
    with pytest.raises(KeyError):
        made.writer.get_cached("b")
    for wrong in (-1, 1 << 20, 1020):
        with pytest.raises(ValueError, match=f"address = {wrong}"):
            made.readers[0].get(wrong, chunk_id)
    made.readers[0].touch("", address, chunk_id)
    made.writer.free_unused()
    assert not made.writer.is_cached("a")
    ring = SingleWriterShmRingBuffer.open(made.writer.handle())
    with pytest.raises(ValueError, match="reader_lock"):
        SingleWriterShmObjectStorage(300, 1, ring)
    ring.close()


def test_a_full_memory_is_an_error_not_a_signal(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(1 << 20, 1 << 19)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(MemoryError, match="No space left"):
            made.writer.put("a", arrays(1, 1000))
    assert made.readers[0].get(*made.writer.put("a", arrays(1, 1000))) == arrays(1, 1000)


OTHER = """
import os, sys, threading, time
from headrace_core.arrays import PackedArray
from headrace_engine.shared_objects.object_storage import SingleWriterShmObjectStorage
from headrace_engine.shared_objects.ring_buffer import RingHandle, SingleWriterShmRingBuffer
if sys.argv[1] == "write":
    ring = SingleWriterShmRingBuffer.create(4096)
    where = SingleWriterShmObjectStorage(999, 1, ring).put("a", {"x": PackedArray("uint8", (3,), b"abc")})
    print(*ring.handle(), *where, flush=True)
else:
    pid, descriptor, size, address, chunk_id = map(int, sys.argv[2:])
    ring = SingleWriterShmRingBuffer.open(RingHandle(pid, descriptor, size))
    found = SingleWriterShmObjectStorage(999, 1, ring, threading.Lock()).get(address, chunk_id)
    print(found["x"].data.decode(), flush=True)
sys.stdin.read()
"""


def other(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, *map(str, words)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def killed(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()


def test_nothing_is_left_of_processes_that_are_killed(world: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    writer = other("write")
    assert writer.stdout is not None
    *handle, address, chunk_id = map(int, writer.stdout.readline().split())
    ring = SingleWriterShmRingBuffer.open(RingHandle(*handle))
    killed(writer)
    reader = SingleWriterShmObjectStorage(999, 1, ring, threading.Lock())
    assert reader.get(address, chunk_id)["x"].data == b"abc", "a reader has it until it closes it"
    reader.close()
    with pytest.raises(OSError, match="No such file"):
        SingleWriterShmRingBuffer.open(RingHandle(*handle))

    made = world(4096, 999)
    where = made.writer.put("a", {"x": PackedArray("uint8", (3,), b"xyz")})
    process = other("read", *made.writer.handle(), *where)
    assert process.stdout is not None
    assert process.stdout.readline() == "xyz\n"
    killed(process)
    made.writer.free_unused()
    assert not made.writer.is_cached("a"), "it had been read"
    assert set(os.listdir("/dev/shm")) <= before
    maps = Path("/proc/self/maps").read_text()
    made.close()
    assert maps.count("headrace-objects") > Path("/proc/self/maps").read_text().count(
        "headrace-objects"
    )
