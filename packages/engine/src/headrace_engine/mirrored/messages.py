"""Messages between the process that has an engine and one that mirrors it: msgpack, never pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from typing import Any

import msgspec

from headrace_core.request import CoreRequest
from headrace_engine.clients.wire import RemoteError
from headrace_engine.messages import CoreOutputs
from headrace_engine.multiproc import frames


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine has started."""

    max_model_len: int
    step_seconds: float
    memory_plan: str


class Added(msgspec.Struct, frozen=True, tag="added"):
    """Its next requests, in order: id and digest of each."""

    requests: list[tuple[str, str]]


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: CoreOutputs


class Called(msgspec.Struct, frozen=True, tag="called"):
    """Its next control call, and its result."""

    call: str
    result: Any = None
    error: RemoteError | None = None


class Died(msgspec.Struct, frozen=True, tag="died"):
    error: RemoteError


class Differs(msgspec.Struct, frozen=True, tag="differs"):
    """From the mirror: its script does something else."""

    reason: str


Message = Ready | Added | Outputs | Called | Died | Differs
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> list[bytes | memoryview]:
    """A message as a frame."""
    return frames.pack(msgspec.msgpack.encode(message))


def receive(connection: socket.socket) -> Message:
    """The next message.

    Raises:
        EOFError, OSError: the other side is gone.
        BadFrame: it is none.
    """
    try:
        return _DECODER.decode(frames.receive(connection))
    except (msgspec.MsgspecError, TypeError) as error:
        raise frames.BadFrame(f"not a message of an engine that is mirrored: {error}") from error


def digest(request: CoreRequest) -> str:
    """Equal for equal requests, whatever they are called and whenever they came."""
    same = dataclasses.replace(request, request_id="", arrival_time=0.0)
    return hashlib.sha256(msgspec.msgpack.encode(same, order="deterministic")).hexdigest()


def describe_call(method: str, args: Any) -> str:
    """A control call, equal for equal calls."""
    return f"{method}({', '.join(map(repr, args))})"
