"""Listening to an engine's KV events: in order, each once, what was missed asked for again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from types import TracebackType

import msgspec
import zmq

from headrace_engine.kv.event_publisher import END_OF_REPLAY, NUMBER_BYTES
from headrace_engine.kv.events import AllBlocksCleared, KVEventBatch, decode

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 2.0
"""Longest wait for a replay to begin, or to go on."""


class KVEventSubscriber:
    """Batches of one engine. Used from one thread.

    The first thing that it does is to ask for all that was sent before. If a batch is lost for good (there is
    no replay address, or the engine does not keep it any longer), or the engine has begun anew, a batch
    that clears everything comes first: whoever applies all batches to
    :class:`~headrace_engine.kv.events.CachedBlocks` never believes in a block that is not there.

    Args:
        endpoint: address at which the engine publishes, as ``tcp://127.0.0.1:5557``.
        replay_endpoint: address at which it repeats; None: what is missed is lost.
        topic: that the engine publishes under.
        context: of ZeroMQ; None: one of its own.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._context = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._lost_connection = self._sub.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sub.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        self._next = 0
        """Number that is expected."""
        self._newest = 0.0
        """Time of the newest batch."""
        self._has_asked = False
        self.num_lost = 0
        """Batches that could not be had."""
        self.num_replayed = 0
        """Batches that came by a replay."""

    def poll(self, seconds: float) -> list[KVEventBatch]:
        """Batches that have come, waiting so long for the first; [] if none has."""
        batches: list[KVEventBatch] = []
        if not self._has_asked:
            self._has_asked = True
            batches += self._replayed(None)
        timeout = 0 if batches else int(seconds * 1000)
        while self._sub.poll(timeout):
            timeout = 0
            batches += self._begun_anew()
            batches += self._taken(self._sub.recv_multipart())
        return batches

    def close(self) -> None:
        """Stop listening."""
        self._sub.disable_monitor()
        self._lost_connection.close(linger=0)
        self._sub.close(linger=0)
        if self._owns_context:
            self._context.term()

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begun_anew(self) -> Iterator[KVEventBatch]:
        """Everything from the beginning, if the connection was lost: numbers alone do not tell whether the
        engine behind it is another one."""
        has_been_lost = False
        while self._lost_connection.poll(0):
            self._lost_connection.recv_multipart()
            has_been_lost = True
        if has_been_lost:
            self._next = 0
            yield _cleared(self._newest)
            yield from self._replayed(None)

    def _taken(self, frames: list[bytes]) -> Iterator[KVEventBatch]:
        """A published message, behind those before it that are missing."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            logger.warning("KV events: a message of %d frames is ignored", len(frames))
            return
        number, batch = int.from_bytes(frames[1], "big"), _decoded(frames[2])
        if batch is None:
            return
        if number < self._next:
            if batch.ts <= self._newest:
                return  # a replay had it
            logger.info("KV events: the engine has begun anew")
            self._next = 0
            yield _cleared(batch.ts)
        if number > self._next:
            yield from self._replayed(number)
        if number >= self._next:  # else the replay had this one, too
            yield self._counted(number, batch)

    def _replayed(self, before: int | None) -> Iterator[KVEventBatch]:
        """Missing batches, as far as the engine keeps them; it may send newer ones with them.

        Args:
            before: number of the batch that has come; None: none has.
        """
        for number, payload in self._replay(self._next):
            batch = _decoded(payload)
            if batch is None or number < self._next:
                continue
            if number > self._next:
                yield self._lost(number, batch.ts)
            self.num_replayed += 1
            yield self._counted(number, batch)
        if before is not None and before > self._next:
            yield self._lost(before, self._newest)

    def _lost(self, number: int, ts: float) -> KVEventBatch:
        """Go on with a number: what lies before it is lost."""
        self.num_lost += number - self._next
        logger.warning("KV events: %d batches are lost", number - self._next)
        self._next = number
        return _cleared(ts)

    def _counted(self, number: int, batch: KVEventBatch) -> KVEventBatch:
        self._next = number + 1
        self._newest = max(self._newest, batch.ts)
        return batch

    def _replay(self, start: int) -> list[tuple[int, bytes]]:
        """Numbers and payloads that the engine keeps, from ``start`` on."""
        if self._replay_endpoint is None:
            return []
        found: list[tuple[int, bytes]] = []
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            socket.send(start.to_bytes(NUMBER_BYTES, "big"))
            deadline = time.monotonic() + REPLAY_SECONDS
            while socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                number, payload = socket.recv_multipart()[-2:]
                if number == END_OF_REPLAY:
                    return found
                found.append((int.from_bytes(number, "big"), payload))
                deadline = time.monotonic() + REPLAY_SECONDS
            logger.warning("KV events: no replay from %s", self._replay_endpoint)
        finally:
            socket.close(linger=0)
        return found


def _cleared(ts: float) -> KVEventBatch:
    return KVEventBatch(ts, [AllBlocksCleared()])


def _decoded(payload: bytes) -> KVEventBatch | None:
    try:
        return decode(payload)
    except msgspec.MsgspecError as error:
        logger.warning("KV events: a batch cannot be read: %s", error)
        return None
