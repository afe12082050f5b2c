"""Messages between rank 0 and another rank. Each is one frame (:mod:`headrace_engine.multiproc.frames`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_core.batch import ForwardBatch
from headrace_engine.clients.wire import RemoteError


class ModelPass(NamedTuple):
    """Rank 0 runs this method of the model now, and so does the other rank. No answer."""

    method: str
    args: tuple[Any, ...]


def without_metadata(message: ModelPass) -> ModelPass:
    """The pass as other ranks get it: batches without attention metadata, which each prepares itself."""
    return ModelPass(message.method, tuple(map(_without_metadata, message.args)))


def _without_metadata(arg: Any) -> Any:
    if isinstance(arg, ForwardBatch):
        return dataclasses.replace(arg, attention=()) if arg.attention else arg
    if isinstance(arg, Sequence) and not isinstance(arg, str):
        return list(arg)
    return arg


class WorkerCall(NamedTuple):
    """Run a method of the worker and answer."""

    call_id: int
    method: str
    args: tuple[Any, ...]


class Stop(NamedTuple):
    """Close the worker and end."""


class Answer(NamedTuple):
    """A call's result."""

    call_id: int
    result: Any


class Raised(NamedTuple):
    """A call raised, which the rank survives."""

    call_id: int
    kind: str
    message: str
    details: dict[str, Any]

    @classmethod
    def of(cls, call_id: int, error: RemoteError) -> Raised:
        """A call's error."""
        return cls(call_id, error.kind, error.message, error.details)

    @property
    def error(self) -> RemoteError:
        """The error as data."""
        return RemoteError(self.kind, self.message, self.details)


class Failed(NamedTuple):
    """The rank ends, because of this exception."""

    kind: str
    message: str
