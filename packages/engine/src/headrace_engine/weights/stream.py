"""Tensors over a TCP stream: safetensors files, one after the other, behind a token.

The engine's end listens, at a port of its own and only for who knows the token. A client sends the token,
and then parts: each is a safetensors file (https://huggingface.co/docs/safetensors, "Format"): eight bytes
with the header's length, the header as JSON, the tensors' bytes. To each part comes a line of JSON:
``{"taken": 12}`` or ``{"error": "..."}``. A part is checked before a byte of its tensors is read, kept in
memory, and goes into the model by ``update_weights`` alone: the stream brings numbers, and gives no orders.

Every number of a header is checked, and nothing is evaluated. A part that cannot be used is not read to its
end: the connection is closed behind the error.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import HeadraceError, RequestError
from headrace_engine.weights.messages import (
    MAX_TENSORS,
    NamedTensors,
    TensorPlace,
    by_name,
    checked_shape,
)

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""Names of dtypes in safetensors files."""
MAX_HEADER = 16 << 20
"""Longest header of a part, in bytes."""
TOKEN_BYTES = 32
TOKEN_SECONDS = 5.0
"""Longest wait for the token."""
CLOSE_SECONDS = 5.0
"""That whoever closes waits for the listener's thread, which ends by itself."""
IDLE_SECONDS = 120.0
"""Longest pause within a part, and between two parts of a connection."""

_ENDED = "the stream ended: is the token right, and the stream open?"

Check = Callable[[str, tuple[int, ...], str], None]


class WeightStream:
    """Listens for parts, in a thread of its own, for one client at a time.

    Args:
        check: of a tensor's name, shape and dtype, whether the model takes it; raises if not. Called in
            the stream's thread.
        max_bytes: of all parts that wait for ``update_weights``.
        host: the address that is listened at.
    """

    def __init__(self, check: Check, max_bytes: int, host: str = "127.0.0.1") -> None:
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._check = check
        self._max_bytes = max_bytes
        self._parts: list[list[tuple[str, Tensor]]] = []
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self._connection: socket.socket | None = None
        self._closed = False
        self.host, self.port = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="headrace-weights", daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[str, Tensor]]:
        """All tensors that have come and were not taken."""
        with self._lock:
            parts, self._parts, self._num_bytes = self._parts, [], 0
        return [pair for part in parts for pair in part]

    def close(self) -> None:
        """Stop listening, and forget what came. Idempotent."""
        self._closed = True
        for one in (self._listener, self._connection):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
        self.take()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._connection = connection
            with connection:
                try:
                    self._serve(connection)
                except (OSError, EOFError) as error:
                    if not self._closed:
                        logger.warning("weight stream: the connection ended: %s", error)
            self._connection = None

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(TOKEN_SECONDS)
        token = _exactly(connection, len(self.token))
        if not hmac.compare_digest(token, self.token.encode()):
            logger.warning("weight stream: a client has no valid token")
            return
        connection.settimeout(IDLE_SECONDS)
        while (length := _length(connection)) is not None:
            try:
                part = self._read(connection, length)
            except (HeadraceError, MemoryError) as error:
                _answer(connection, error=str(error) or type(error).__name__)
                return
            _answer(connection, taken=len(part))

    def _read(self, connection: socket.socket, length: int) -> list[tuple[str, Tensor]]:
        """Read a part behind its first eight bytes, and keep it.

        Raises:
            RequestError, WeightsError: it cannot be used.
        """
        if not 2 <= length <= MAX_HEADER:
            raise RequestError(
                f"header: {length} bytes: must be 2 to {MAX_HEADER}", param="weights"
            )
        tensors = read_header(_exactly(connection, length))
        for one in tensors:
            self._check(one.name, one.shape, one.dtype)
        num_bytes = sum(one.num_bytes for one in tensors)
        with self._lock:
            if self._num_bytes + num_bytes > self._max_bytes:
                raise RequestError(
                    f"part: {num_bytes} bytes, beside {self._num_bytes} that wait for update_weights: must "
                    f"be at most {self._max_bytes} together",
                    param="weights",
                )
        part = []
        for one in tensors:
            tensor = torch.empty(one.shape, dtype=getattr(torch, one.dtype))
            if tensor.numel():
                _fill(connection, tensor.reshape(-1).view(torch.uint8).numpy().data)
            part.append((one.name, tensor))
        with self._lock:
            self._parts.append(part)
            self._num_bytes += num_bytes
        return part


def read_header(header: bytes) -> Sequence[TensorPlace]:
    """The tensors of a safetensors header, in the order of their bytes, which leave no gap.

    Raises:
        RequestError: it is something else.
    """
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique, parse_constant=_refused)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"header: not valid JSON: {error}", param="weights") from error
    if not isinstance(entries, dict) or len(entries) > MAX_TENSORS:
        raise RequestError(
            f"header: must be an object of at most {MAX_TENSORS} tensors", param="weights"
        )
    entries.pop("__metadata__", None)
    tensors, end = [], 0
    places = sorted((_place(name, entry) for name, entry in entries.items()), key=lambda p: p[1:])
    for tensor, start, stop in places:
        if start != end or stop - start != tensor.num_bytes:
            raise RequestError(
                f"header: tensor {tensor.name!r:.200}: data_offsets = [{start}, {stop}]: must be "
                f"[{end}, {end + tensor.num_bytes}]",
                param="weights",
            )
        tensors.append(tensor)
        end = stop
    return tensors


def _place(name: str, entry: object) -> tuple[TensorPlace, int, int]:
    ours = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    offsets = entry["data_offsets"] if ours else None  # type: ignore[index]
    if (
        not ours
        or not isinstance(entry["dtype"], str)  # type: ignore[index]
        or entry["dtype"] not in DTYPES  # type: ignore[index]
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(isinstance(o, int) and not isinstance(o, bool) and o >= 0 for o in offsets)
    ):
        raise RequestError(
            f"header: tensor {name!r:.200}: must have dtype ({', '.join(DTYPES)}), shape and data_offsets",
            param="weights",
        )
    assert isinstance(entry, dict)
    shape = checked_shape(name, entry["shape"])
    return TensorPlace(name, DTYPES[entry["dtype"]], shape), offsets[0], offsets[1]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _length(connection: socket.socket) -> int | None:
    """The next header's length; None: there is no further part."""
    first = connection.recv(1)
    if not first:
        return None
    (length,) = struct.unpack("<Q", first + _exactly(connection, 7))
    return int(length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes, in memory that grows as they come."""
    got = bytearray()
    while len(got) < size:
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


class WeightSender:
    """A client of a :class:`WeightStream`: a trainer's end.

    >>> with WeightSender(**opened) as sender:  # what POST /open_weight_stream answered
    ...     sender.send(model.state_dict())

    Args:
        host, port, token: as the engine has told them.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._connection = socket.create_connection((host, port), timeout=IDLE_SECONDS)
        self._answers = self._connection.makefile("rb")
        self._connection.sendall(token.encode())

    def send(self, weights: NamedTensors) -> None:
        """Send a part; returns when the engine has it.

        Raises:
            RequestError: the engine refuses it, or the token.
        """
        from safetensors.torch import save

        named = {name: tensor.detach().to("cpu").contiguous() for name, tensor in by_name(weights)}
        try:
            self._connection.sendall(save(_apart(named)))
            line = self._answers.readline(1 << 16)
        except OSError as error:  # it may have said why before it closed
            line = self._last_line()
            if not line:
                raise RequestError(f"weights: {_ENDED} ({error})", param="weights") from error
        answer = json.loads(line) if line else {"error": _ENDED}
        if "error" in answer:
            raise RequestError(f"weights: {answer['error']}", param="weights")

    def close(self) -> None:
        """Send no more. Idempotent."""
        self._answers.close()
        self._connection.close()

    def _last_line(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._answers.readline(1 << 16)
        return b""

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _apart(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which no two are the same memory (a head that is the embedding), as the format wants."""
    seen: set[int] = set()
    found = {}
    for name, tensor in named.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found
