"""A trainer's end of a :class:`~headrace_engine.weights.stream.WeightStream`."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping

from torch import Tensor

from headrace_core.errors import RequestError
from headrace_engine.weights.messages import NamedTensors, by_name
from headrace_engine.weights.plain_tensors import plain

ANSWER_SECONDS = 120.0
"""Longest wait for the engine, which may be checking a part."""
_ENDED = (
    "the stream ended: is the token right, and the stream open? A part that was refused ended its "
    "connection: make another WeightSender"
)


class WeightSender:
    """A client of a :class:`WeightStream`: a trainer's end.

    >>> with WeightSender(**opened) as sender:  # what POST /open_weight_stream answered
    ...     sender.send(model.state_dict())

    Args:
        host, port, token: as the engine has told them.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._connection = socket.create_connection((host, port), timeout=ANSWER_SECONDS)
        self._answers = self._connection.makefile("rb")
        self._connection.sendall(token.encode())

    def send(self, weights: NamedTensors) -> None:
        """Send a part; returns when the engine has it.

        Raises:
            RequestError: the engine refuses it, or the token; or a tensor has no plain numbers in memory
                (:func:`~headrace_engine.weights.plain_tensors.plain`).
        """
        from safetensors.torch import save

        named = {
            name: plain(name, tensor).detach().to("cpu").contiguous()
            for name, tensor in by_name(weights)
        }
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
