"""Who decodes next: held by a clock of the test's own, and by events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from headrace_core.errors import GenerateError
from headrace_core.reliability.sandbox_process import ProcessEnded
from headrace_multimodal.decoder_pool import GOOD, DecoderPool
from headrace_multimodal.decoder_turns import DecodeJob, DecoderTurns
from headrace_multimodal.reading import Reading, current, reading

QUANTUM = 1.0
FOREVER = 1000.0


class Child:
    """A decoder that only knows how often it was interrupted."""

    def __init__(self) -> None:
        self.interrupted = threading.Semaphore(0)

    def interrupt(self) -> None:
        self.interrupted.release()

    def kill(self) -> None:
        pass


MADE: list[Decoders] = []


@pytest.fixture(autouse=True)
def nobody_waits_on() -> Iterator[None]:
    """Else a thread that waits keeps the interpreter from ending."""
    yield
    while MADE:
        decoders = MADE.pop()
        while not all(future.done() for future in decoders.begun):
            decoders.advance(2 * FOREVER)  # a thread may only now begin to wait
        decoders.pool.shutdown()


class Decoders:
    """So many decoders, files that wait for them in threads, and a clock."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.turns: DecoderTurns = DecoderTurns(
            [Child() for _ in range(count)],  # type: ignore[misc]
            QUANTUM,
            clock=lambda: self.now,
        )
        self.pool = ThreadPoolExecutor(32)
        self.begun: list[Future[Any]] = []
        MADE.append(self)

    def begin(self, job: DecodeJob) -> Future[Any]:
        """Wait in a thread, and have the decoder begin."""

        def wait() -> Any:
            child = self.turns.wait(job, FOREVER)
            self.turns.begin(job)
            return child

        before = self.turns.num_waiting + self.turns.num_running
        future = self.pool.submit(wait)
        self.begun.append(future)
        while self.turns.num_waiting + self.turns.num_running == before and not future.done():
            pass
        return future

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.turns.look_again()


def job() -> DecodeJob:
    return DecodeJob(Reading(Future()))


def test_slow_files_keep_no_other_waiting_longer_than_a_quantum() -> None:
    """Six files of ten seconds each, on two decoders, and one that is quick."""
    decoders = Decoders(2)
    slow = [job() for _ in range(6)]
    waits = [decoders.begin(one) for one in slow]
    first, second = waits[0].result(60), waits[1].result(60)
    running = {slow[0]: first, slow[1]: second}
    quick = job()
    served = decoders.begin(quick)
    rounds = 0
    while not served.done():
        rounds += 1
        assert rounds <= 6, "each of the six had more than its quantum"
        decoders.advance(QUANTUM)
        # One of the two may go on; the other is interrupted, and waits with the slow ones.
        ended = _interrupted(running)
        del running[ended]
        decoders.turns.leave(ended)
        assert ended.slow
        waits[slow.index(ended)] = decoders.begin(ended)
        _settle(decoders, slow, waits, running, served)
    assert quick.process is not None
    assert sum(one.process is not None for one in slow) == 1


def _interrupted(running: dict[DecodeJob, Any]) -> DecodeJob:
    while True:
        for one in running:
            if one.interrupted:
                return one


def _settle(
    decoders: Decoders, slow: list[DecodeJob], waits: list[Any], running: Any, served: Any
) -> None:
    """Until both decoders are taken again."""
    while decoders.turns.num_running < 2 or not (
        served.done() or any(w.done() and one not in running and one.process is not None
                             for one, w in zip(slow, waits, strict=True))
    ):  # fmt: skip
        pass
    for one, wait in zip(slow, waits, strict=True):
        if one.process is not None and one not in running:
            running[one] = wait.result(60)


def test_files_are_served_in_the_order_in_which_they_came() -> None:
    decoders = Decoders(1)
    jobs = [job() for _ in range(5)]
    waits = [decoders.begin(one) for one in jobs]
    for one, wait in zip(jobs, waits, strict=True):
        wait.result(60)
        assert [other for other in jobs if other.process is not None] == [one]
        decoders.turns.leave(one)


def test_a_single_decoder_is_not_taken_from_a_slow_file() -> None:
    decoders = Decoders(1)
    slow, other = job(), job()
    child = decoders.begin(slow).result(60)
    waiting = decoders.begin(other)
    decoders.advance(5 * QUANTUM)
    assert not child.interrupted.acquire(blocking=False)
    decoders.turns.leave(slow)
    assert waiting.result(60) is child


def test_a_file_for_nobody_waits_no_longer_and_gives_its_decoder_up() -> None:
    decoders = Decoders(2)
    running, beside, waiting, other = job(), job(), job(), job()
    child = decoders.begin(running).result(60)
    decoders.begin(beside).result(60)
    left = decoders.begin(waiting)
    waiting.reading.abandoned.set_result(None)
    with pytest.raises(CancelledError):
        left.result(60)
    assert decoders.turns.num_waiting == 0
    running.reading.abandoned.set_result(None)
    served = decoders.begin(other)
    assert not running.interrupted, "it may end by itself within its quantum"
    decoders.advance(QUANTUM)
    assert child.interrupted.acquire(timeout=60)
    decoders.turns.leave(running)
    assert served.result(60) is child


def test_a_child_that_cannot_start_is_no_fault_of_the_file(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = DecoderPool("no_such_module", what="image", max_bytes=9, seconds=9.0, processes=1)
    with pytest.raises(GenerateError, match="decodes images did not start"):
        pool.decode(b"file", "messages[0].content[0]")
    assert "did not start" in caplog.text
    assert "no_such_module" in capfd.readouterr().err
    assert pool.turns.num_running == 0


class InterruptedOnce(Child):
    """A child that is interrupted at its first file, and answers the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.running = 0, True
        self.began = threading.Event()

    def start(self) -> None:
        pass

    def ask(self, data: bytes, seconds: float) -> bytes:
        self.asked += 1
        if self.asked > 1:
            return GOOD + data
        self.began.set()
        assert self.interrupted.acquire(timeout=60)
        raise ProcessEnded


def test_an_interrupted_file_holds_no_place_and_is_decoded_in_the_end() -> None:
    decoders = Decoders(2)
    pool = DecoderPool("none", what="image", max_bytes=9, seconds=9.0, processes=1)
    child, spare = InterruptedOnce(), InterruptedOnce()
    spare.asked = 1  # it answers at once
    decoders.turns = DecoderTurns([spare, child], QUANTUM, clock=lambda: decoders.now)  # type: ignore[list-item]
    pool.turns = decoders.turns
    admitted: list[int] = []

    def decode() -> bytes:
        with reading(Future(), lambda: admitted.append(child.asked + spare.asked)):
            return bytes(pool.decode(b"file", "messages[0]"))

    decoded = decoders.pool.submit(decode)
    assert child.began.wait(60)
    beside, other = job(), job()
    beside.slow = True
    decoders.begin(beside).result(60)
    served = decoders.begin(other)
    decoders.advance(QUANTUM)  # both decoders have slow files now, and one is waited for
    assert served.result(60) is child
    assert admitted == []
    decoders.turns.leave(beside)
    decoders.turns.leave(other)
    assert decoded.result(60) == b"file"
    assert admitted == [3]


def test_what_a_thread_reads_is_known_to_it_alone() -> None:
    gone: Future[None] = Future()
    with reading(gone, lambda: None):
        assert current().abandoned is gone
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: current().abandoned).result(60) is not gone
        gone.set_result(None)
        with pytest.raises(CancelledError):
            current().check()
    assert not current().abandoned.done()
