"""The ring of messages: order, wrap-around, slow readers, ends that go away."""

from __future__ import annotations

import ctypes
import hashlib
import random
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace_core.errors import ConfigError
from headrace_distributed.errors import GroupError, PeerLost, PeerTimeout
from headrace_distributed.shm import library
from headrace_distributed.shm.ring import RingReader, RingWriter, parse_ring_handle

pytestmark = pytest.mark.skipif(
    not library.available(), reason="the native library was not built: no C++ compiler, or no Linux"
)


def message(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def ring(num_readers: int, capacity: int) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter(num_readers, capacity)
    return writer, [RingReader(str(writer.handle), index) for index in range(num_readers)]


class RingModel(RuleBasedStateMachine):
    """Sends that fit and receives in any order, beside queues: no loss, no duplicate, order kept."""

    @initialize(num_readers=st.integers(1, 3), power=st.integers(0, 4))
    def open(self, num_readers: int, power: int) -> None:
        self.lines = 1 << power
        self.writer, self.readers = ring(num_readers, 64 * self.lines)
        self.queues: list[deque[bytes]] = [deque() for _ in range(num_readers)]
        self.count = 0

    def lines_of(self, size: int) -> int:
        return (size + 8 + 63) // 64

    def used(self) -> int:
        return max(sum(self.lines_of(len(m)) for m in queue) for queue in self.queues)

    @rule(size=st.integers(0, 1100))
    def send(self, size: int) -> None:
        self.count += 1
        data = message(self.count, size)
        if self.lines_of(size) > self.lines:
            return  # needs readers at the same time: below
        if self.used() + self.lines_of(size) > self.lines:
            with pytest.raises(PeerTimeout, match="made room within 0 s"):
                self.writer.send(data, timeout=0)
            return
        self.writer.send(data, timeout=0)
        for queue in self.queues:
            queue.append(data)

    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        if self.queues[index]:
            assert self.readers[index].receive(timeout=0) == self.queues[index].popleft()
        else:
            with pytest.raises(PeerTimeout, match="no message within 0 s"):
                self.readers[index].receive(timeout=0)

    @precondition(lambda self: hasattr(self, "writer"))
    @rule()
    def look(self) -> None:
        self.writer.check_readers()

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            for reader, queue in zip(self.readers, self.queues, strict=True):
                for data in queue:  # what was sent before the end is there
                    assert reader.receive(timeout=0) == data
                with pytest.raises(PeerLost, match=r"the writer .* has left the ring"):
                    reader.receive()
                reader.close()


TestRing = RingModel.TestCase
TestRing.settings = settings(max_examples=60, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    num_readers=st.integers(1, 3),
    power=st.integers(0, 5),
)
def test_messages_of_every_size_pass_a_ring_of_every_size(
    sizes: list[int], num_readers: int, power: int
) -> None:
    """Also those larger than the ring, which go through in pieces."""
    writer, readers = ring(num_readers, 64 << power)
    sent = [message(number, size) for number, size in enumerate(sizes)]
    with ThreadPoolExecutor(num_readers) as pool:
        received = [
            pool.submit(lambda end=reader: [end.receive(60) for _ in sent]) for reader in readers
        ]
        for data in sent:
            writer.send(data, 60)
        assert all(found.result() == sent for found in received)


@pytest.mark.timeout(120)
def test_a_sleeper_is_woken() -> None:
    """Nobody spins, so each message wakes its reader: by themselves they look ten times a second."""
    forth, back = RingWriter(1, 64, spin_seconds=0), RingWriter(1, 64, spin_seconds=0)
    there, here = (RingReader(str(end.handle), 0, spin_seconds=0) for end in (forth, back))

    def echo() -> None:
        while data := there.receive():
            back.send(data)

    with ThreadPoolExecutor(1) as pool:
        echoing = pool.submit(echo)
        for number in range(3000):
            data = number.to_bytes(4, "big")
            forth.send(data)
            assert here.receive() == data
        forth.send(b"")
        echoing.result()


READER = """
import hashlib, random, sys
from headrace_distributed.shm.ring import RingReader
from headrace_distributed.errors import PeerLost
reader, late = RingReader(sys.argv[1], int(sys.argv[2])), random.Random(sys.argv[2])
digest, count = hashlib.sha256(), 0
while True:
    try:
        data = reader.receive()
    except PeerLost as lost:
        print(count, digest.hexdigest(), lost)
        break
    if not data:
        sys.stdin.read()  # the test's own turn
    digest.update(data); count += 1
    for _ in range(late.choice((0, 0, 0, 3000))):
        pass
"""


@pytest.fixture
def readers() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def start(readers: list[subprocess.Popen[str]], writer: RingWriter) -> None:
    for index in range(writer.handle.num_readers):
        words = [sys.executable, "-c", READER, str(writer.handle), str(index)]
        pipe = subprocess.PIPE
        readers.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True))
    writer.wait_for_readers(120)


def fill(writer: RingWriter, timeout: float) -> None:
    """Send until there is no room."""
    while True:
        writer.send(b"x" * 100, timeout)


def test_processes_receive_everything_in_order(readers: list[subprocess.Popen[str]]) -> None:
    digest, count = hashlib.sha256(), 20_000
    with RingWriter(2, 1 << 12) as writer:
        start(readers, writer)
        sizes = random.Random(1)
        for number in range(count):
            data = number.to_bytes(4, "big") * sizes.choice((1, 5, 60, 300, 2000))
            digest.update(data)
            writer.send(data, 60)
    for process in readers:
        assert process.stdout is not None
        seen = process.stdout.readline()
        assert seen.startswith(f"{count} {digest.hexdigest()} the writer"), seen
        assert "has left the ring" in seen


def test_a_killed_reader_is_named_and_nothing_is_overwritten(
    readers: list[subprocess.Popen[str]],
) -> None:
    with RingWriter(2, 1 << 12) as writer:
        start(readers, writer)
        readers[1].send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match="reader 1 has died") as caught:
            fill(writer, 60)
        assert caught.value.rank == 1
        with pytest.raises(PeerLost, match="reader 1 has died"):
            writer.check_readers()


def test_a_stopped_reader_ends_the_wait(readers: list[subprocess.Popen[str]]) -> None:
    with RingWriter(1, 1 << 12) as writer:
        start(readers, writer)
        writer.send(b"")  # it waits for the test now
        with pytest.raises(
            PeerTimeout, match=r"reader 0 has not made room within 0\.1 s"
        ) as caught:
            fill(writer, 0.1)
        assert caught.value.rank == 0


WRITER = """
import os, signal
from headrace_distributed.shm.ring import RingWriter
writer = RingWriter(1, 1 << 12)
print(writer.handle, flush=True)
writer.wait_for_readers()
writer.send(b"one")
input()
writer.send(bytes(1 << 20))
"""


def test_a_killed_writer_is_told_within_a_message() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with RingReader(process.stdout.readline().strip(), 0) as reader:
        assert reader.receive(60) == b"one"
        process.stdin.write("\n")
        process.stdin.flush()
        with ThreadPoolExecutor(1) as pool:
            # The first pieces are in the ring when the writer ends: the reader has begun, or will.
            found = pool.submit(lambda: reader.receive(60) if first_piece(reader) else None)
            assert found.result() is None
            process.kill()
            process.wait()
            with pytest.raises(PeerLost, match=r"the writer \(pid \d+\) has died"):
                pool.submit(reader.receive, 60).result()
    process.stdin.close()
    process.stdout.close()


def first_piece(reader: RingReader) -> bool:
    """Wait for the beginning of a message without taking it; False, since its end will not come."""
    length = ctypes.c_int64()
    status = library.load().hr_ring_next(reader._open(), ctypes.byref(length), int(60e9))
    assert (status, length.value) == (library.OK, 1 << 20)
    return False


def test_a_reader_that_left_is_named() -> None:
    writer, readers = ring(2, 64)
    readers[0].close()
    with pytest.raises(PeerLost, match="reader 0 has left the ring"):
        writer.check_readers()
    writer.send(b"one")
    with pytest.raises(PeerLost, match="reader 0 has left the ring"):
        writer.send(b"two")
    assert readers[1].receive() == b"one"


def test_readers_that_do_not_come_are_named() -> None:
    writer = RingWriter(2)
    reader = RingReader(str(writer.handle), 0)
    with pytest.raises(PeerTimeout, match=r"reader 1 has not opened the ring within 0\.1 s"):
        writer.wait_for_readers(0.1)
    writer.send(b"early")  # waits for nobody, and is not lost
    other = RingReader(str(writer.handle), 1)
    writer.wait_for_readers(0)
    assert reader.receive() == other.receive() == b"early"


@pytest.mark.parametrize(
    "data", [bytearray(b"abc"), memoryview(b"abc"), memoryview(bytearray(b"abc"))]
)
def test_every_kind_of_bytes_is_taken(data: bytearray | memoryview) -> None:
    writer, readers = ring(1, 128)
    writer.send(data)
    assert readers[0].receive() == b"abc"


def test_an_end_that_was_closed_says_so() -> None:
    writer, readers = ring(1, 64)
    writer.close()
    readers[0].close()
    with pytest.raises(GroupError, match="this end of the ring was closed"):
        writer.send(b"")
    with pytest.raises(GroupError, match="this end of the ring was closed"):
        readers[0].receive()
    with pytest.raises(GroupError, match=r"cannot be opened|any more"):
        RingReader(str(writer.handle), 0)


@pytest.mark.parametrize("capacity", [0, 63, 100, 1 << 37])
def test_a_capacity_that_is_none_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"capacity_bytes = {capacity} must be a power of two"):
        RingWriter(1, capacity)


@pytest.mark.parametrize("text", ["", "1:2:3", "1:2:3/x/64", "1:2/1/64", "1:2:3/-1/64"])
def test_a_handle_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="handle"):
        parse_ring_handle(text)


def test_two_readers_are_not_one() -> None:
    writer, readers = ring(1, 64)
    with pytest.raises(GroupError, match="reader 0 was opened before"):
        RingReader(str(writer.handle), 0)
    readers[0].close()
    with pytest.raises(GroupError, match="reader 0 was opened before"):
        RingReader(str(writer.handle), 0)


def test_a_reader_that_is_none_is_refused() -> None:
    with (
        RingWriter(2, 64) as writer,
        pytest.raises(ValueError, match="reader 2 must be within 0 and 1"),
    ):
        RingReader(str(writer.handle), 2)
