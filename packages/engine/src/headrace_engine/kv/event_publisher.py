"""Publishing of the prefix cache's events over ZeroMQ, with numbers, and again on request.

A PUB socket sends three frames: topic, number (8 bytes, big-endian), batch
(:mod:`headrace_engine.kv.events`). Numbers go up by one, so who misses one knows it. A ROUTER socket
repeats: a request holds the first number that is wanted, 8 bytes; the answer is a message (number, batch) for
each batch that is still kept, then one with the number -1 and nothing. The engine never waits: a batch for
which there is no room is dropped, and its number stays unused.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import zmq

from headrace_core.errors import AddressError
from headrace_engine.config import KVEventsConfig
from headrace_engine.kv.events import Event, KVEventBatch, encode

logger = logging.getLogger(__name__)

NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""Number of the message that ends a replay."""
LAST_SECONDS = 1.0
"""Longest wait for what is queued to be sent, at the end."""
MOST_PORT = 65535
_WILDCARDS, _LOOPBACK = ("*", "0.0.0.0", "[::]"), ("127.0.0.1", "localhost", "[::1]")
_LOOK_MS = 100
"""Milliseconds between looks whether the end has come."""


class EventPublisher(Protocol):
    """The receiver of a KV manager's events."""

    def publish(self, events: Sequence[Event]) -> None:
        """Send a step's events. Never blocks.

        Raises:
            RuntimeError: after :meth:`shutdown`.
        """
        ...

    def shutdown(self) -> None:
        """Send what is queued, for a second at most, and close. Idempotent."""
        ...


def make_publisher(config: KVEventsConfig, data_parallel_rank: int = 0) -> EventPublisher | None:
    """The publisher that the settings ask for; None: they ask for none.

    Raises:
        AddressError: an address cannot be had.
    """
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    return ZmqEventPublisher(config, data_parallel_rank)


def endpoint_of(endpoint: str, rank: int) -> str:
    """The address of one data-parallel rank: a TCP port higher by the rank, or a name with it.

    Raises:
        ValueError: the address is of another kind.
    """
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        if port == "*" and not rank:
            return endpoint
        if not port.isdigit():
            raise ValueError("it must end with a port")
        number = int(port) + rank
        if not 1 <= number <= MOST_PORT:  # ZeroMQ takes some of them modulo 65536
            raise ValueError(f"its port must be in 1..{MOST_PORT - rank}, or *")
        return f"{host}:{number}"
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    if endpoint.startswith("ipc://") and not rank:
        return endpoint
    raise ValueError("it must begin with tcp:// or inproc://, without ranks also ipc://")


def is_bound(endpoint: str) -> bool:
    """True if a publisher listens at the address, False if it connects to somebody who does."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return not endpoint.startswith("tcp://") or host in _WILDCARDS or host in _LOOPBACK


class ZmqEventPublisher:
    """See :class:`EventPublisher`. Two threads: one sends, one repeats.

    Args:
        config: addresses and bounds.
        data_parallel_rank: moves the addresses, and is written into batches.
        context: of ZeroMQ; None: one of its own.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        data_parallel_rank: int = 0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._rank = data_parallel_rank
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, bytes] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()
        self._next = 0
        self._closing = threading.Event()
        self.num_dropped = 0
        """Batches for which there was no room."""
        self._context = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._router: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _open(self._pub, config.endpoint, data_parallel_rank)
            """Address at which batches are sent."""
            self.replay_endpoint = ""
            """Address at which they are repeated; "": nowhere."""
            if config.replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self.replay_endpoint = _open(
                    self._router, config.replay_endpoint, data_parallel_rank
                )
        except AddressError:
            self._close_sockets()
            raise
        self._threads = [
            threading.Thread(target=self._send, name="headrace-kv-events", daemon=True)
        ]
        if self._router is not None:
            self._threads.append(
                threading.Thread(target=self._repeat, name="headrace-kv-replay", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        logger.info(
            "KV events at %s, replayed at %s", self.endpoint, self.replay_endpoint or "none"
        )
        if config.endpoint.removeprefix("tcp://").rpartition(":")[0] in _WILDCARDS:
            logger.warning("KV events: %s is open to the network, and they hold the token ids of prompts",
                           config.endpoint)  # fmt: skip

    def publish(self, events: Sequence[Event]) -> None:
        """See :meth:`EventPublisher.publish`."""
        if self._closing.is_set():
            raise RuntimeError("the publisher of KV events is shut down")
        number, self._next = self._next, self._next + 1
        payload = encode(KVEventBatch(time.time(), list(events), self._rank))
        try:
            self._queue.put_nowait((number, payload))
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("KV events: no room in the queue; batches are dropped")

    def shutdown(self) -> None:
        """See :meth:`EventPublisher.shutdown`."""
        if self._closing.is_set():
            return
        deadline = time.monotonic() + LAST_SECONDS
        self._closing.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) + 2 * _LOOK_MS / 1000)
        if not any(thread.is_alive() for thread in self._threads):
            self._close_sockets()

    def _send(self) -> None:
        deadline = None
        while True:
            try:
                item = self._queue.get(timeout=_LOOK_MS / 1000)
            except queue.Empty:
                item = None
            if item is not None:
                number, payload = item
                with self._lock:
                    self._kept.append(item)
                self._pub.send_multipart(
                    [self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload]
                )
            if self._closing.is_set():
                deadline = deadline or time.monotonic() + LAST_SECONDS
                if self._queue.empty() or time.monotonic() > deadline:
                    return

    def _repeat(self) -> None:
        assert self._router is not None
        while not self._closing.is_set():
            if not self._router.poll(_LOOK_MS):
                continue
            frames = self._router.recv_multipart()
            # A DEALER sends one frame, a REQ an empty one before: both get what they expect.
            client, start = frames[:-1], frames[-1]
            if len(start) != NUMBER_BYTES:
                logger.warning("KV events: a replay request of %d bytes is ignored", len(start))
                continue
            first = int.from_bytes(start, "big")
            with self._lock:
                wanted = [(number, payload) for number, payload in self._kept if number >= first]
            for number, payload in wanted:
                self._router.send_multipart(
                    [*client, number.to_bytes(NUMBER_BYTES, "big"), payload]
                )
            self._router.send_multipart([*client, END_OF_REPLAY, b""])

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=int(LAST_SECONDS * 1000))
        if self._owns_context:
            self._context.term()


def _open(socket: zmq.Socket[bytes], given: str, rank: int) -> str:
    """Bind or connect; the address that it has."""
    try:
        endpoint = endpoint_of(given, rank)
        (socket.bind if is_bound(endpoint) else socket.connect)(endpoint)
    except (zmq.ZMQError, ValueError) as error:
        raise AddressError(
            f"kv_events_config: the address {given!r} could not be had: {error}",
            field="kv_events_config",
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
