"""Frames between two engines over TCP, once each has shown the other that it knows the secret.

Opening: the server sends ``"HRKV" | u8 version | nonce``, the client the same with its own nonce and a proof,
the server its proof. Nonces and proofs have 32 bytes; a proof is HMAC-SHA256 (RFC 2104) over a label and
both nonces, with the secret as key. Then each side sends frames, little-endian:
``u8 kind | u32 length | payload | tag``. A tag is BLAKE2b-128 (RFC 7693) over the frame's number, kind,
length and payload, with a key of this connection and direction: it tells damaged bytes, and bytes that
somebody without the secret put there.
Nothing is encrypted, and nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

MAGIC, VERSION = b"HRKV", 2
NONCE_BYTES = PROOF_BYTES = 32
TAG_BYTES = 16
_HEAD = struct.Struct("<BI")
_NUMBER = struct.Struct("<Q")
_GREETING = MAGIC + bytes([VERSION])
OPENING_SECONDS = 5.0
"""Longest opening; who says nothing holds a connection no longer."""
Clock = Callable[[], float]


class ChannelError(OSError):
    """The other side broke the protocol, or is not who it should be."""


class Channel:
    """One end of a connection whose opening is done. One thread sends and one receives.

    Args:
        connection: closed by :meth:`close`.
        send_key, receive_key: of this connection.
        clock: monotonic seconds; deadlines are its times.
    """

    def __init__(
        self,
        connection: socket.socket,
        send_key: bytes,
        receive_key: bytes,
        clock: Clock = time.monotonic,
    ) -> None:
        self._socket, self._clock = connection, clock
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self._head = b""

    def send(self, kind: int, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send a frame whose payload is ``parts``, one after the other.

        Raises: OSError: it failed, or took until the deadline.
        """
        head = _HEAD.pack(kind, sum(len(part) for part in parts))
        tag = _tag(self._send_key, self._num_sent, head, parts)
        self._num_sent += 1
        for part in (head, *parts, tag):
            _limit(self._socket, deadline - self._clock())
            self._socket.sendall(part)

    def next_frame(self, deadline: float) -> tuple[int, int]:
        """Kind and length of the frame that comes; :meth:`receive` must follow.

        Raises: OSError: as :meth:`receive`.
        """
        self._head = _received(self._socket, _HEAD.size, deadline, self._clock)
        kind, length = _HEAD.unpack(self._head)
        return kind, length

    def receive(self, into: Sequence[memoryview], deadline: float) -> None:
        """Read the payload into buffers, one after the other, which have its length together.

        Raises:
            ChannelError: it was damaged; the buffers hold anything.
            OSError: the connection broke, or the deadline has passed.
        """
        for part in into:
            _fill(self._socket, part, deadline, self._clock)
        tag = _received(self._socket, TAG_BYTES, deadline, self._clock)
        wanted = _tag(self._receive_key, self._num_received, self._head, into)
        self._num_received += 1
        if not hmac.compare_digest(tag, wanted):
            raise ChannelError("a frame was damaged on its way")

    def receive_bytes(self, length: int, most: int, deadline: float) -> bytes:
        """A payload of at most ``most`` bytes.

        Raises:
            ChannelError: it says that it is longer; nothing of it was read.
        """
        if length > most:
            raise ChannelError(f"a frame of {length} bytes, where at most {most} are expected")
        payload = bytearray(length)
        self.receive([memoryview(payload)], deadline)
        return bytes(payload)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def open_as_client(connection: socket.socket, secret: bytes, deadline: float) -> Channel:
    """The opening, from the side that connected.

    Raises:
        ChannelError: the other side is no engine, or has another secret.
        OSError: the connection broke, or the deadline has passed.
    """
    theirs = _greeting(connection, deadline)
    ours = secrets.token_bytes(NONCE_BYTES)
    nonces = theirs + ours
    _limit(connection, deadline - time.monotonic())
    connection.sendall(_GREETING + ours + _prove(secret, b"client", nonces))
    try:
        proof = _received(connection, PROOF_BYTES, deadline, time.monotonic)
    except ChannelError as error:
        raise ChannelError("it closed the connection: its secret may be another") from error
    if not hmac.compare_digest(proof, _prove(secret, b"server", nonces)):
        raise ChannelError("it has another secret")
    return Channel(
        connection,
        _prove(secret, b"to server", nonces),
        _prove(secret, b"to client", nonces),
    )


def open_as_server(connection: socket.socket, secret: bytes) -> Channel:
    """The opening, from the side that listens.

    Raises:
        ChannelError: the other side is no engine, or has another secret.
        OSError: the connection broke, or it took longer than :data:`OPENING_SECONDS`.
    """
    deadline = time.monotonic() + OPENING_SECONDS
    ours = secrets.token_bytes(NONCE_BYTES)
    _limit(connection, OPENING_SECONDS)
    connection.sendall(_GREETING + ours)
    nonces = ours + _greeting(connection, deadline)
    proof = _received(connection, PROOF_BYTES, deadline, time.monotonic)
    if not hmac.compare_digest(proof, _prove(secret, b"client", nonces)):
        raise ChannelError("it has another secret")
    connection.sendall(_prove(secret, b"server", nonces))
    return Channel(
        connection,
        _prove(secret, b"to client", nonces),
        _prove(secret, b"to server", nonces),
    )


def _greeting(connection: socket.socket, deadline: float) -> bytes:
    """The other side's nonce."""
    head = _received(connection, len(_GREETING) + NONCE_BYTES, deadline, time.monotonic)
    if not head.startswith(MAGIC):
        raise ChannelError("no engine that gives blocks away listens there")
    if not head.startswith(_GREETING):
        raise ChannelError(f"it speaks version {head[len(MAGIC)]} of the protocol, not {VERSION}")
    return head[len(_GREETING) :]


def _prove(secret: bytes, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"headrace kv " + label + nonces, "sha256")


def _tag(key: bytes, number: int, head: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    digest = blake2b(_NUMBER.pack(number) + head, key=key, digest_size=TAG_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _received(connection: socket.socket, size: int, deadline: float, clock: Clock) -> bytes:
    data = bytearray(size)
    _fill(connection, memoryview(data), deadline, clock)
    return bytes(data)


def _fill(connection: socket.socket, into: memoryview, deadline: float, clock: Clock) -> None:
    done = 0
    while done < len(into):
        _limit(connection, deadline - clock())
        count = connection.recv_into(into[done:])
        if not count:
            raise ChannelError("it closed the connection")
        done += count


def _limit(connection: socket.socket, seconds: float) -> None:
    if seconds <= 0:
        raise TimeoutError("it took too long")
    connection.settimeout(seconds)
