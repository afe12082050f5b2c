"""The process of a host other than rank 0's (``--headless``): starts its ranks, and serves nothing."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from headrace_engine.clients.process import describe_status
from headrace_engine.config import EngineConfig
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.handles import start_child
from headrace_engine.multiproc.messages import Stop
from headrace_engine.multiproc.nodes import tcp
from headrace_engine.multiproc.nodes.joined import MOST_BYTES
from headrace_engine.multiproc.nodes.joining import Joined, join_rank_0
from headrace_engine.multiproc.nodes.messages import NodeEnds
from headrace_engine.multiproc.nodes.plan import NodePlan
from headrace_engine.multiproc.places import RankPlace
from headrace_engine.multiproc.rank_process import EXIT_ORPHANED

logger = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""Longest time until ranks that rank 0 has told to stop have ended, before they are killed."""
NEWS_SECONDS = 1.0
"""Longest wait for the reason of rank 0's end, after a rank has found its connection closed."""


class _Child(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    lifeline: socket.socket
    """Its end is the child's end."""


class _ChildEnded(NamedTuple):
    child: _Child
    status: int


class _Signalled(NamedTuple):
    number: int


def run_node(plan: NodePlan, factory: str, config: EngineConfig) -> int:
    """Join rank 0's engine and run this host's ranks until it ends; returns the process's exit status.

    The main thread's business: SIGINT and SIGTERM end the ranks, and with them the engine.

    Raises: as :func:`~headrace_engine.multiproc.nodes.joining.join_rank_0`.
    """
    with contextlib.closing(join_rank_0(plan)) as joined:
        logger.info(
            "node %d has ranks %s of %d, and follows rank 0 at %s",
            plan.node, ", ".join(map(str, joined.accepted.ranks)), joined.accepted.world_size,
            tcp.name_of((plan.host, plan.port)),
        )  # fmt: skip
        return _Host(plan, joined, factory, config).run()


class _Host:
    def __init__(self, plan: NodePlan, joined: Joined, factory: str, config: EngineConfig) -> None:
        self._plan, self._joined = plan, joined
        self._factory, self._config = factory, config
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._children: list[_Child] = []

    def run(self) -> int:
        with _signals_to(self._events):
            try:
                for rank in self._joined.accepted.ranks:
                    self._start(rank)
                self._thread(self._read)
                return self._wait()
            finally:
                self._end_children()

    def _start(self, rank: int) -> None:
        accepted = self._joined.accepted
        place = RankPlace(
            rank, accepted.world_size, accepted.communicator, accepted.rendezvous, accepted.stages,
            num_here=len(accepted.ranks),
        )  # fmt: skip
        ours, theirs = socket.socketpair()
        connection = self._joined.ranks.pop(rank)
        process = start_child(self._factory, self._config, place, ours, [connection, theirs])
        child = _Child(rank, process, ours)
        self._children.append(child)
        self._thread(lambda: self._events.put(_ChildEnded(child, process.wait())))

    def _thread(self, run: Any) -> None:
        threading.Thread(target=run, name="headrace-node", daemon=True).start()

    def _read(self) -> None:
        """What rank 0 says; its end, if it says nothing."""
        try:
            self._events.put(frames.receive(self._joined.control, MOST_BYTES))
        except (EOFError, OSError, frames.BadFrame):
            place = tcp.name_of((self._plan.host, self._plan.port))
            self._events.put(NodeEnds(f"rank 0 at {place} is gone"))

    def _wait(self) -> int:
        event = self._next()
        while (
            isinstance(event, _ChildEnded) and event.status == 0
        ):  # told to, over its own connection
            event = self._next()
        if isinstance(event, _ChildEnded) and event.status == EXIT_ORPHANED:
            event = self._next(NEWS_SECONDS) or event
        if isinstance(event, Stop):
            return self._stopped()
        reason = self._reason(event)
        if not isinstance(event, NodeEnds):
            with contextlib.suppress(OSError):
                frames.send(self._joined.control, frames.pack(NodeEnds(reason)))
        logger.error("node %d ends: %s", self._plan.node, reason)
        return 1

    def _next(self, seconds: float | None = None) -> Any:
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _reason(self, event: Any) -> str:
        if isinstance(event, NodeEnds):
            return event.reason
        node = self._plan.node
        if isinstance(event, _Signalled):
            return f"node {node} was ended by {signal.Signals(event.number).name}"
        if isinstance(event, _ChildEnded):
            rank, pid = event.child.rank, event.child.process.pid
            how = describe_status(event.status)
            return f"rank {rank} (process {pid} on node {node}) ended: {how}"
        return f"node {node} does not understand {event!r:.200}"

    def _stopped(self) -> int:
        """Rank 0 has told the ranks to stop, too."""
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        logger.info("node %d ends: the engine was shut down", self._plan.node)
        return 0

    def _end_children(self) -> None:
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
            child.lifeline.close()


@contextmanager
def _signals_to(events: queue.SimpleQueue[Any]) -> Iterator[None]:
    """SIGINT and SIGTERM become events meanwhile."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [
        signal.signal(number, lambda got, _: events.put(_Signalled(got))) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
