"""The processes of the ranks beside rank 0, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.errors import EngineDead
from headrace_engine.clients.wire import as_exception
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.handles import ChildRank, NodeRank, RankHandle, start_child
from headrace_engine.multiproc.incoming import EXPECT
from headrace_engine.multiproc.messages import (
    Answer,
    Failed,
    ModelPass,
    Raised,
    Stop,
    WorkerCall,
    without_metadata,
)
from headrace_engine.multiproc.nodes.joined import JoinedNode
from headrace_engine.multiproc.nodes.messages import NodeEnds
from headrace_engine.multiproc.pass_frames import PassEncoder
from headrace_engine.multiproc.places import RankedWorkers
from headrace_engine.multiproc.rank_process import STARTED
from headrace_engine.threads import in_this_context

logger = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""Longest time until a process that was told to stop ends, before it is killed."""
REASON_SECONDS = 2.0
"""Longest wait for how a process ended, once its connection is closed."""
CAUSE_SECONDS = 2.0
"""Longest wait for the news of a rank's end, after rank 0 has failed in a pass."""


class _Rank:
    """One process, its connection, and who waits for its answers."""

    def __init__(self, rank: int, process: RankHandle, connection: socket.socket) -> None:
        self.rank = rank
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
        nodes: further hosts, whose processes are started.
    """

    def __init__(
        self,
        ranked: RankedWorkers,
        rendezvous: Mapping[str, str],
        died: Callable[[EngineDead], None],
        nodes: Sequence[JoinedNode] = (),
    ) -> None:
        self._died = died
        self._nodes = tuple(nodes)
        self._lock = threading.Lock()
        """Guards who waits for answers, and :attr:`failure`."""
        self._sending = threading.Lock()
        """Held while one message is sent."""
        self._encoder = PassEncoder()
        self.failure: EngineDead | None = None
        self._has_failed = threading.Event()
        self._stopping = False
        self._last_call = STARTED
        self._ranks: list[_Rank] = []
        self._wake, self._woken = socket.socketpair()
        try:
            for rank in range(1, ranked.num_here or ranked.world_size):
                self._ranks.append(_start(ranked, rank, rendezvous))
            for node in nodes:
                for rank, connection in sorted(node.ranks.items()):
                    self._ranks.append(_Rank(rank, NodeRank(rank, node), connection))
        except BaseException as error:
            self.kill(error)
            for started in self._ranks:
                started.process.wait(STOP_SECONDS)
            self._close()
            raise
        self._thread = threading.Thread(
            target=in_this_context(self._read), name="headrace-ranks", daemon=True
        )
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids on their hosts, by rank from 1."""
        return [rank.process.pid for rank in self._ranks]

    def wait_started(self) -> None:
        """Return when every rank has made its worker. Raises what that raised, or that it ended."""
        for rank in self._ranks:
            rank.started.result()

    def run_pass(self, message: ModelPass) -> None:
        """Send a pass to every rank. Raises OSError."""
        with self._sending:  # in this order, too, are passes encoded
            frame = self._encoder.encode(message)
            if frame is None:
                self._send_pieces(frames.pack(without_metadata(message)))
            else:
                self._send_whole(frame)

    def expect_pass(self) -> None:
        """Tell every rank that a pass is about to come."""
        with contextlib.suppress(OSError), self._sending:  # the pass will meet that, too
            self._send_whole(EXPECT)

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
        if self._ranks:
            self._has_failed.wait(CAUSE_SECONDS)
        return self.failure or error

    def stop(self) -> None:
        """Have every process end, and wait for it; those that do not are killed. Idempotent."""
        if not self._stopping:
            self._stopping = True
            for node in self._nodes:
                node.tell(Stop())
            with contextlib.suppress(OSError):
                self._send(Stop())
        for rank in self._ranks:
            if not rank.process.wait(STOP_SECONDS):
                logger.warning("rank %d did not end in %g s; it is killed", rank.rank, STOP_SECONDS)
                rank.process.kill()
                rank.process.wait(STOP_SECONDS)
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._leave_nobody_waiting(EngineDead("the engine has been shut down"))
            self._close()

    def kill(self, cause: BaseException | None = None) -> None:
        """End every process now; :meth:`stop` is still to be called.

        Args:
            cause: which other hosts are told.
        """
        self._stopping = True
        self._tell_nodes(cause)
        for rank in self._ranks:
            rank.process.kill()

    def _tell_nodes(self, cause: BaseException | None) -> None:
        for node in self._nodes:
            node.tell(NodeEnds("rank 0 ends" if cause is None else str(cause)))

    def _send(self, message: ModelPass | WorkerCall | Stop) -> None:
        pieces = frames.pack(message)
        with self._sending:
            self._send_pieces(pieces)

    def _send_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        for rank in self._ranks:
            frames.send(rank.connection, pieces)

    def _send_whole(self, frame: bytes) -> None:
        for rank in self._ranks:
            rank.connection.sendall(frame)

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
        for node in self._nodes:
            node.close()
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
            raised.add_note(f"raised by rank {rank.rank}")
            future.set_exception(raised)
        elif isinstance(message, Answer):
            if message.call_id == STARTED:
                rank.process.made(message.result)
            future.set_result(message.result)
        return True

    def _ended(self, rank: _Rank, error: BaseException) -> None:
        """A rank has ended, or says what nobody understands: it ends now."""
        if isinstance(error, frames.BadFrame):
            rank.last_words = str(error)
            rank.process.kill()
        rank.process.gone()
        reason = rank.process.reason(0.0 if self._stopping else REASON_SECONDS, rank.last_words)
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
            self._tell_nodes(dead)
            self._died(dead)
        for future in waiting:  # who gets this finds the executor ended
            future.set_exception(dead)


def _start(ranked: RankedWorkers, rank: int, rendezvous: Mapping[str, str]) -> _Rank:
    ours, theirs = socket.socketpair()
    place = ranked.place(rank, rendezvous)
    process = start_child(ranked.factory, ranked.config, place, ours, [theirs])
    return _Rank(rank, ChildRank(rank, process), ours)
