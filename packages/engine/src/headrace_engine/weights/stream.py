"""Tensors over a TCP stream: safetensors files, one after the other, behind a token.

The engine's end listens, at a port of its own and only for who knows the token. A client sends the token,
and then parts: each is a safetensors file (https://huggingface.co/docs/safetensors, "Format"): eight bytes
with the header's length, the header as JSON, the tensors' bytes. To each part comes a line of JSON:
``{"taken": 12}`` or ``{"error": "..."}``. A part is checked before a byte of its tensors is read, kept in
memory, and goes into the model by ``update_weights`` alone: the stream brings numbers, and gives no orders.

Every number of a header is checked, and nothing is evaluated. A part that cannot be used is not read to its
end: the connection is closed behind the error. Whatever a connection brings, the others and the listener go
on.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace_core.errors import HeadraceError, RequestError
from headrace_engine.execution.refusal import memory_errors
from headrace_engine.weights.messages import TensorPlace
from headrace_engine.weights.part_limits import PartLimits
from headrace_engine.weights.stream_header import MAX_HEADER, read_header

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
TOKEN_SECONDS = 5.0
"""Longest time from a connection's beginning to the end of its token."""
CLOSE_SECONDS = 5.0
"""That whoever closes waits for each of the stream's threads, which end by themselves."""
IDLE_SECONDS = 120.0
"""Longest pause within a part, and between two parts of a connection."""
RETRY_SECONDS = 1.0
"""Pause after the system refused a connection (no descriptors are left, for example)."""
MAX_STRANGERS = 16
"""Connections that have not shown the token; one more ends the oldest of them."""
MAX_CLIENTS = 8
"""Connections that have shown it."""

Part = Sequence[tuple[str, Tensor]]
"""Name and tensor."""


class PartCheck(Protocol):
    """Says whether the model takes what is on its way. Called in the stream's threads."""

    def check_places(self, tensors: Sequence[TensorPlace]) -> None:
        """Raises: HeadraceError, the model does not take these names, shapes and dtypes."""
        ...

    def check_values(self, name: str, tensor: Tensor) -> None:
        """Raises: HeadraceError, the tensor's numbers are none that a model may have."""
        ...


class WaitingParts:
    """Parts that have come and wait for ``update_weights``, within limits. For several threads.

    Args:
        limits: of all of them together, and of the bytes that are being read.
    """

    def __init__(self, limits: PartLimits) -> None:
        self._limits = limits
        self._parts: list[Part] = []
        self._names: set[str] = set()
        """Of tensors that wait."""
        self._waiting_bytes = self._coming_bytes = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Room for a part while it is read.

        Raises:
            RequestError: it would be too much together.
        """
        with self._lock:
            taken = self._waiting_bytes + self._coming_bytes
            if taken + num_bytes > self._limits.num_bytes:
                raise RequestError(
                    f"part: {num_bytes} bytes, beside {taken} that wait for update_weights: must be at most "
                    f"{self._limits.num_bytes} together",
                    param="weights",
                )
            self._coming_bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._coming_bytes -= num_bytes

    def add(self, part: Part) -> None:
        """Keep a part.

        Raises:
            RequestError: a tensor waits already, or too many do.
        """
        with self._lock:
            twice = next((name for name, _ in part if name in self._names), None)
            if twice is not None:
                raise RequestError(
                    f"tensor {twice!r:.200} comes twice: it waits for update_weights already",
                    param="weights",
                )
            if len(self._names) + len(part) > self._limits.num_tensors:
                raise RequestError(
                    f"part: {len(part)} tensors, beside {len(self._names)} that wait for update_weights: "
                    f"must be at most {self._limits.num_tensors} together",
                    param="weights",
                )
            if part:
                self._parts.append(part)
                self._names.update(name for name, _ in part)
                self._waiting_bytes += sum(tensor.nbytes for _, tensor in part)

    def take(self) -> list[Part]:
        """All that wait, which wait no longer."""
        with self._lock:
            parts = self._parts
            self._keep([])
        return parts

    def give_back(self, parts: Sequence[Part]) -> None:
        """Have parts that were taken wait again, before those that came meanwhile."""
        with self._lock:
            self._keep([*parts, *self._parts])

    @property
    def num_tensors(self) -> int:
        """Tensors that wait."""
        with self._lock:
            return sum(map(len, self._parts))

    def _keep(self, parts: list[Part]) -> None:
        """Let these be what waits. The lock is held."""
        self._parts = parts
        self._names = {name for part in parts for name, _ in part}
        self._waiting_bytes = sum(tensor.nbytes for part in parts for _, tensor in part)


class WeightStream:
    """Listens for parts, in threads of its own: one for the listener, and one for each connection.

    Args:
        check: of what comes.
        limits: of all parts that wait for ``update_weights``.
        host: the address that is listened at.
    """

    def __init__(self, check: PartCheck, limits: PartLimits, host: str = "127.0.0.1") -> None:
        self.token = secrets.token_hex(TOKEN_BYTES)
        self.parts = WaitingParts(limits)
        self._check = check
        self._strangers: dict[socket.socket, threading.Thread] = {}
        """Connections that have not shown the token, the oldest first."""
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.create_server((host, 0))
        self.host, self.port = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="headrace-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and forget what came. Idempotent."""
        self._closed.set()
        _shut(self._listener)
        self._listener.close()
        with self._lock:
            connections = {**self._strangers, **self._clients}
            for one in connections:
                _shut(one)
        for thread in (self._thread, *connections.values()):
            thread.join(CLOSE_SECONDS)
        self.parts.take()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.is_set():
                    logger.warning("weight stream: no connection could be taken: %s", error)
                    self._closed.wait(RETRY_SECONDS)
                continue
            try:
                self._begin(connection)
            except RuntimeError as error:  # no thread can be started
                logger.warning("weight stream: a connection was closed: %s", error)
                self._end(connection)

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve, args=[connection], name="headrace-weights-client", daemon=True
        )
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS:
                _shut(next(iter(self._strangers)))  # its thread ends, and forgets it
            self._strangers[connection] = thread
            thread.start()  # with the lock, so that close() joins none that has not begun

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._clients.pop(connection, None)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """A connection's thread."""
        try:
            if self._has_token(connection) and self._becomes_client(connection):
                connection.settimeout(IDLE_SECONDS)
                while (length := _length(connection)) is not None:
                    _answer(connection, taken=len(self._read(connection, length)))
        except (HeadraceError, MemoryError) as error:
            with contextlib.suppress(OSError):
                _answer(connection, error=str(error) or type(error).__name__)
        except (OSError, EOFError) as error:
            if not self._closed.is_set():
                logger.warning("weight stream: the connection ended: %s", error)
        except Exception:
            logger.exception("weight stream: a part could not be read")
            with contextlib.suppress(OSError):
                _answer(connection, error="the part could not be read; the engine's log says why")
        finally:
            self._end(connection)

    def _has_token(self, connection: socket.socket) -> bool:
        expected = self.token.encode()
        given = _exactly(connection, len(expected), time.monotonic() + TOKEN_SECONDS)
        if not hmac.compare_digest(given, expected):
            logger.warning("weight stream: a client has no valid token")
            return False
        return True

    def _becomes_client(self, connection: socket.socket) -> bool:
        """Count a connection that has shown the token.

        Raises:
            RequestError: there are as many as there may be.
        """
        with self._lock:
            if self._closed.is_set():
                return False
            thread = self._strangers.pop(connection)
            if len(self._clients) >= MAX_CLIENTS:
                raise RequestError(
                    f"weight stream: {MAX_CLIENTS} connections send already: must be at most as many",
                    param="weights",
                )
            self._clients[connection] = thread
        return True

    def _read(self, connection: socket.socket, length: int) -> Part:
        """Read a part behind its first eight bytes, and keep it.

        Raises:
            HeadraceError: it cannot be used. MemoryError: the system has no memory for it.
        """
        if not 2 <= length <= MAX_HEADER:
            raise RequestError(
                f"header: {length} bytes: must be 2 to {MAX_HEADER}", param="weights"
            )
        tensors = read_header(_exactly(connection, length))
        self._check.check_places(tensors)
        with self.parts.room(sum(one.num_bytes for one in tensors)):
            part = []
            for one in tensors:
                with memory_errors(f"tensor {one.name!r:.200}"):
                    tensor = torch.empty(one.shape, dtype=getattr(torch, one.dtype))
                if tensor.numel():
                    _fill(connection, tensor.reshape(-1).view(torch.uint8).numpy().data)
                self._check.check_values(one.name, tensor)
                part.append((one.name, tensor))
        self.parts.add(part)
        return part


def _shut(one: socket.socket) -> None:
    """Have whoever waits for this socket wait no longer."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _length(connection: socket.socket) -> int | None:
    """The next header's length; None: there is no further part."""
    first = connection.recv(1)
    if not first:
        return None
    (length,) = struct.unpack("<Q", first + _exactly(connection, 7))
    return int(length)


def _exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """So many bytes, in memory that grows as they come.

    Args:
        deadline: of all of them, by ``time.monotonic``; None: the socket's own timeout counts.
    """
    got = bytearray()
    while len(got) < size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(min(size - len(got), 1 << 20))
        if not more:
            raise EOFError(f"after {len(got)} of {size} bytes")
        got += more
    return bytes(got)


def _fill(connection: socket.socket, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = connection.recv_into(memory[done:])
        if not count:
            raise EOFError(f"after {done} of {len(memory)} bytes of a tensor")
        done += count


def _answer(connection: socket.socket, **fields: Any) -> None:
    connection.sendall(json.dumps(fields).encode() + b"\n")
