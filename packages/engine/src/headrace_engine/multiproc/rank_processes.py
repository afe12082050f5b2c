"""The processes of the ranks beside rank 0, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from headrace_core.context import MODEL
from headrace_core.errors import EngineDead
from headrace_engine.clients.process import describe_status
from headrace_engine.clients.wire import as_exception
from headrace_engine.log_lines import writes_colours, writes_json
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.messages import Answer, Failed, ModelPass, Raised, Stop, WorkerCall
from headrace_engine.multiproc.places import RankedWorkers, RankHello, RankPlace
from headrace_engine.multiproc.rank_process import STARTED
from headrace_engine.threads import in_this_context

logger = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""Longest time until a process that was told to stop ends, before it is killed."""
CAUSE_SECONDS = 2.0
"""Longest wait for the news of a rank's end, after rank 0 has failed in a pass."""


class _Rank:
    """One process, its connection, and who waits for its answers."""

    def __init__(
        self, place: RankPlace, process: subprocess.Popen[bytes], connection: socket.socket
    ) -> None:
        self.place = place
        self.process = process
        self.connection = connection
        self.started: Future[Any] = Future()
        self.waiting: dict[int, Future[Any]] = {STARTED: self.started}
        self.last_words = ""
        """Why it ends, as it says itself."""


class RankProcesses:
    """Starts the other ranks, sends them messages and takes their answers.

    Passes come from the worker's thread, calls from any. A thread of its own reads the answers, and sees at
    once when a process ends.

    Args:
        ranked: what to start.
        rendezvous: the communicator's, by group.
        died: called, in that thread, with the reason when a rank has ended that was not told to.
    """

    def __init__(
        self,
        ranked: RankedWorkers,
        rendezvous: Mapping[str, str],
        died: Callable[[EngineDead], None],
    ) -> None:
        self._died = died
        self._lock = threading.Lock()
        """Guards who waits for answers, and :attr:`failure`."""
        self._sending = threading.Lock()
        """Held while one message is sent."""
        self.failure: EngineDead | None = None
        self._has_failed = threading.Event()
        self._stopping = False
        self._last_call = STARTED
        self._ranks: list[_Rank] = []
        self._wake, self._woken = socket.socketpair()
        try:
            for rank in range(1, ranked.world_size):
                self._ranks.append(_start(ranked, ranked.place(rank, rendezvous)))
        except BaseException:
            self.kill()
            for started in self._ranks:
                started.process.wait()
            self._close()
            raise
        self._thread = threading.Thread(
            target=in_this_context(self._read), name="headrace-ranks", daemon=True
        )
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank from 1."""
        return [rank.process.pid for rank in self._ranks]

    def wait_started(self) -> None:
        """Return when every rank has made its worker. Raises what that raised, or that it ended."""
        for rank in self._ranks:
            rank.started.result()

    def run_pass(self, message: ModelPass) -> None:
        """Send a pass to every rank. Raises OSError."""
        self._send(message)

    def call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        """Call a method of every rank's worker; results by rank from 1.

        Raises:
            EngineDead: a rank has ended.
        """
        futures: list[Future[Any]] = [Future() for _ in self._ranks]
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._last_call += 1
            call_id = self._last_call
            for rank, future in zip(self._ranks, futures):
                rank.waiting[call_id] = future
        with contextlib.suppress(OSError):  # it has ended: who waits is told so
            self._send(WorkerCall(call_id, method, tuple(args)))
        return futures

    def cause_of(self, error: BaseException) -> BaseException:
        """What to raise for an error of rank 0 in a pass: the end of another rank, if that was the cause."""
        self._has_failed.wait(CAUSE_SECONDS)
        return self.failure or error

    def stop(self) -> None:
        """Have every process end, and wait for it; those that do not are killed. Idempotent."""
        if not self._stopping:
            self._stopping = True
            with contextlib.suppress(OSError):
                self._send(Stop())
        for rank in self._ranks:
            try:
                rank.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.warning(
                    "rank %d did not end in %g s; it is killed", rank.place.rank, STOP_SECONDS
                )
                rank.process.kill()
                rank.process.wait(STOP_SECONDS)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._leave_nobody_waiting(EngineDead("the engine has been shut down"))
            self._close()

    def kill(self) -> None:
        """End every process now; :meth:`stop` is still to be called."""
        self._stopping = True
        for rank in self._ranks:
            rank.process.kill()

    def _send(self, message: ModelPass | WorkerCall | Stop) -> None:
        pieces = frames.pack(message)
        with self._sending:
            for rank in self._ranks:
                frames.send(rank.connection, pieces)

    def _leave_nobody_waiting(self, dead: EngineDead) -> None:
        """Calls beside the steps may still wait for answers, or come later."""
        with self._lock:
            self.failure = self.failure or dead
            waiting = [future for one in self._ranks for future in one.waiting.values()]
            for one in self._ranks:
                one.waiting.clear()
        for future in waiting:
            future.set_exception(dead)

    def _close(self) -> None:
        for rank in self._ranks:
            rank.connection.close()
        self._wake.close()
        self._woken.close()

    # The reading thread, from here on.

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank in self._ranks:
                selector.register(rank.connection, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    if not self._take(key.data):
                        selector.unregister(key.fileobj)

    def _take(self, rank: _Rank) -> bool:
        """Take one message of a rank; False: it has ended."""
        try:
            message = frames.receive(rank.connection)
        except (EOFError, OSError, frames.BadFrame) as error:
            self._ended(rank, error)
            return False
        if isinstance(message, Failed):
            rank.last_words = f"{message.kind}: {message.message}"
            return True
        with self._lock:
            future = rank.waiting.pop(message.call_id, None)
        if future is None:  # another rank has ended, of which who waited was told
            return True
        if isinstance(message, Raised):
            raised = as_exception(message.error)
            raised.add_note(f"raised by rank {rank.place.rank}")
            future.set_exception(raised)
        elif isinstance(message, Answer):
            future.set_result(message.result)
        return True

    def _ended(self, rank: _Rank, error: BaseException) -> None:
        """A rank has ended, or says what nobody understands: it ends now."""
        if isinstance(error, frames.BadFrame):
            rank.last_words = str(error)
            rank.process.kill()
        try:
            how = describe_status(rank.process.wait(STOP_SECONDS))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            how = "closed its connection"
        if rank.last_words:
            how = rank.last_words
        reason = f"rank {rank.place.rank} (process {rank.process.pid}) ended: {how}"
        dead = EngineDead(reason)
        with self._lock:
            first = self.failure is None
            if first:
                self.failure = dead
            waiting = [future for one in self._ranks for future in one.waiting.values()]
            for one in self._ranks:
                one.waiting.clear()
        self._has_failed.set()
        if first and not self._stopping:
            self._died(dead)
        for future in waiting:  # who gets this finds the executor ended
            future.set_exception(dead)


def _start(ranked: RankedWorkers, place: RankPlace) -> _Rank:
    ours, theirs = socket.socketpair()
    with theirs:
        hello = RankHello(
            factory=ranked.factory,
            config=ranked.config,
            place=place,
            log_level=logger.getEffectiveLevel(),
            log_json=writes_json(__name__),
            log_colour=writes_colours(__name__),
            log_model=MODEL.get(),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace_engine.multiproc.rank_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            process_group=0,  # a terminal's Ctrl-C is rank 0's, also while this one imports
        )
    with contextlib.suppress(OSError):  # ended already: whoever reads will say so
        frames.send(ours, frames.pack(msgspec.json.encode(hello)))
    return _Rank(place, process, ours)
