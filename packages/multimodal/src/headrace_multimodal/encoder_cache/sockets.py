"""Vectors that a producer holds in memory and hands to consumers over loopback TCP.

A question is 4 bytes that tell the protocol and the 32 of a key. The answer is a length of 8 bytes and a file
(:mod:`headrace_multimodal.encoder_cache.vectors_file`); length 0: there is none.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace_core.arrays import PackedArray
from headrace_core.errors import ConfigError
from headrace_core.multimodal import ECConnector
from headrace_multimodal.encoder_cache.vectors_file import check_key, from_file, to_file

MAGIC = b"HEC1"
QUESTION = len(MAGIC) + 32
SECONDS = 2.0
"""Limit of one exchange."""
REST_SECONDS = 10.0
"""After a failure nothing is asked for so long: steps do not wait for a producer that is away."""
MAX_CONNECTIONS = 64
FIELD = "multimodal.ec_transfer_config"
HOST, PORT = "127.0.0.1", 14579
"""Where a producer listens, unless it is told."""
_LENGTH = struct.Struct("<Q")


class SocketConnector(ECConnector):
    """A producer listens at ``ec_ip``:``ec_port`` and holds ``ec_buffer_size`` bytes, those that were used
    last; a consumer asks there, or at ``addresses`` (host:port) of its extra config, one after the other.

    Raises:
        ConfigError: an address is not of loopback (nobody is asked who he is), or cannot be had.
    """

    def __init__(
        self, settings: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(settings)
        extra = settings["ec_connector_extra_config"]
        produces = settings["ec_role"] == "ec_producer"
        known = set() if produces else {"addresses"}
        for name in sorted(set(extra) - known):
            raise _wrong(f"ec_connector_extra_config.{name}", extra[name], "left out")
        if "addresses" in extra and {"ec_ip", "ec_port"} & set(settings):
            raise _wrong(
                "ec_ip", settings.get("ec_ip"), "left out beside addresses, as must ec_port"
            )
        host, port = settings.get("ec_ip", HOST), settings.get("ec_port", PORT)
        own = _loopback("ec_ip", host), int(port)
        limit = int(settings["ec_buffer_size"])
        self._store = _Store(limit)
        self._server = _listen(own, self._store) if produces else None
        stated = extra.get("addresses") or [f"{own[0]}:{own[1]}"]
        places = [] if produces else [_address(one) for one in stated]
        self._producers = [_Producer(*place, limit, clock) for place in places]

    @property
    def port(self) -> int:
        """Where a producer listens; 0: it is none."""
        return 0 if self._server is None else int(self._server.server_address[1])

    def save(self, key: str, vectors: PackedArray) -> None:
        self._store.put(bytes.fromhex(check_key(key)), to_file(vectors))

    def load(self, key: str) -> PackedArray | None:
        name = bytes.fromhex(check_key(key))
        data = self._store.get(name)
        for producer in self._producers if data is None else ():
            data = producer.ask(name)
            if data is not None:
                break
        return None if data is None else from_file(data)

    def close(self) -> None:
        for producer in self._producers:
            producer.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Store:
    """Files that were used last. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def put(self, name: bytes, data: bytes) -> None:
        if len(data) > self._max_bytes:
            raise OSError(f"vectors of {len(data)} bytes; ec_buffer_size is {self._max_bytes}")
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return
            self._kept[name] = data
            self._num_bytes += len(data)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, name: bytes) -> bytes | None:
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)


class _Server(socketserver.ThreadingTCPServer):
    """Answers consumers, a thread each, and no more than :data:`MAX_CONNECTIONS`."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], store: _Store) -> None:
        self.store, self._places = store, threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, _Answering)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A consumer that has gone is no error of this side."""


class _Answering(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            self.request.settimeout(None)  # a consumer may be silent for long
            question = _received(self.request, QUESTION)
            if question is None or not question.startswith(MAGIC):
                return
            self.request.settimeout(SECONDS)
            data = self.server.store.get(question[len(MAGIC) :]) or b""
            self.request.sendall(_LENGTH.pack(len(data)))
            self.request.sendall(data)


class _Producer:
    """A consumer's connection to one producer, made when it is needed and again when it broke."""

    def __init__(self, host: str, port: int, max_bytes: int, clock: Callable[[], float]) -> None:
        self._address, self._max_bytes, self._clock = (host, port), max_bytes, clock
        self._socket: socket.socket | None = None
        self._rests_until = 0.0

    def ask(self, name: bytes) -> bytes | None:
        """A file; None: the producer has none, or it failed a moment ago.

        Raises: OSError: it fails now.
        """
        if self._clock() < self._rests_until:
            return None
        try:
            return self._asked(name)
        except OSError as error:
            self.close()
            self._rests_until = self._clock() + REST_SECONDS
            host, port = self._address
            raise OSError(f"producer at {host}:{port}: {error}") from error

    def _asked(self, name: bytes) -> bytes | None:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, SECONDS)
        until = self._clock() + SECONDS
        self._socket.settimeout(SECONDS)
        self._socket.sendall(MAGIC + name)
        head = _received(self._socket, _LENGTH.size, lambda: until - self._clock())
        if head is None:
            raise OSError("it closed the connection")
        (size,) = _LENGTH.unpack(head)
        if size > self._max_bytes:
            raise OSError(f"an answer of {size} bytes; ec_buffer_size is {self._max_bytes}")
        data = _received(self._socket, size, lambda: until - self._clock()) if size else b""
        if data is None:
            raise OSError("it closed the connection")
        return data or None

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def _received(
    source: socket.socket, size: int, left: Callable[[], float] | None = None
) -> bytes | None:
    """So many bytes; None: the other side closed.

    Args:
        left: seconds that all of them may still take; None: the socket's own limit holds, for each piece.

    Raises: TimeoutError: they took longer.
    """
    found = bytearray()
    while len(found) < size:
        if left is not None:
            if (seconds := left()) <= 0:
                raise TimeoutError(f"{len(found)} of {size} bytes came within {SECONDS:g} s")
            source.settimeout(seconds)
        piece = source.recv(min(size - len(found), 1 << 20))
        if not piece:
            return None
        found += piece
    return bytes(found)


def _listen(address: tuple[str, int], store: _Store) -> _Server:
    """Raises: ConfigError: the address cannot be had."""
    try:
        server = _Server(address, store)
    except OSError as error:
        raise _wrong("ec_port", address[1], f"free at {address[0]}: {error.strerror}") from error
    serve = partial(server.serve_forever, poll_interval=0.05)
    threading.Thread(target=serve, name="vectors-of-media", daemon=True).start()
    return server


def _address(stated: object) -> tuple[str, int]:
    host, _, port = str(stated).rpartition(":")
    where = "ec_connector_extra_config.addresses"
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise _wrong(where, stated, "host:port of producers")
    return _loopback(where, host), int(port)


def _loopback(name: str, host: str) -> str:
    try:
        good = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        good = False
    if not good:
        raise _wrong(name, host, "an address of loopback, as the connection asks nobody who he is")
    return host


def _wrong(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{FIELD}.{name} = {value!r}: must be {accepted}", field=f"{FIELD}.{name}")
