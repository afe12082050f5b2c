"""One rank's stage, and how the stream of hidden states comes to it and goes on from it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace_core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.parallel import Communicator

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ABSENT = -1
"""Stands for the dtype of a tensor that is not there."""
_DIMS = 2


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's place among the stages. :attr:`BuildContext.stage` of a model that is cut."""

    index: int
    count: int
    partition: tuple[int, ...] = ()
    """Numbers of layers by stage, as the user wants them; empty: chosen by the layers' memory."""
    before: Link | None = None
    """From the stage before; None at the first stage."""
    after: Link | None = None
    """To the next stage; None at the last."""
    result: Link | None = None
    """From the last stage to the first, on the ranks that use what comes out; None on others."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class _Wanted(NamedTuple):
    """A stream that is to come, and who waits for it."""

    layer: int
    then: Callable[[Tensor, Tensor | None], Tensor]
    future: Future[Callable[[], Tensor]]


class Link:
    """A way from one rank to another for a stream of hidden states.

    A stream comes in two terms, see :class:`headrace_models.layers.decoder.Block`; the second may be absent.

    Args:
        pair: a group of two ranks.
        sender: the one that sends.
    """

    def __init__(self, pair: Communicator, sender: int = 0) -> None:
        self._pair, self._sender = pair, sender
        self._wanted: queue.SimpleQueue[_Wanted] = queue.SimpleQueue()
        self._receiver: threading.Thread | None = None

    def send(self, x: Tensor, residual: Tensor | None, layer: int) -> None:
        """Send a stream.

        Args:
            x: [R, H].
            residual: [R, H] or None.
            layer: number of layers that the stream has passed.
        """
        header = torch.tensor([layer, *_described(x), *_described(residual)], dtype=torch.int64)
        self._pair.broadcast(header, self._sender)
        for tensor in (x, residual):
            if tensor is not None and tensor.numel():
                self._pair.broadcast(tensor.contiguous(), self._sender)

    def receive(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """The next stream that comes.

        Args:
            layer: number of layers that it must have passed.

        Raises:
            ModelError: it has passed others: the two ranks have cut the model differently.
        """
        header = self._pair.broadcast(
            torch.zeros(1 + 2 * (1 + _DIMS), dtype=torch.int64), self._sender
        )
        passed, *described = header.tolist()
        if passed != layer:
            raise ModelError(
                f"a stage got a stream that has passed {passed} layers, and needs one after {layer}: the "
                "ranks have cut the model differently"
            )
        x, residual = self._receive(described[: 1 + _DIMS]), self._receive(described[1 + _DIMS :])
        assert x is not None
        return x, residual

    def expect(
        self, layer: int, then: Callable[[Tensor, Tensor | None], Tensor]
    ) -> Future[Callable[[], Tensor]]:
        """As :meth:`receive`, in a thread of its own: the sender need not wait for who uses the stream.

        Args:
            then: what is to be made of the stream, when the result is called.
        """
        if self._receiver is None:
            self._receiver = threading.Thread(
                target=self._receive_all, name="headrace-stages", daemon=True
            )
            self._receiver.start()
        wanted = _Wanted(layer, then, Future())
        self._wanted.put(wanted)
        return wanted.future

    def _receive_all(self) -> None:
        while True:
            layer, then, future = self._wanted.get()
            try:
                x, residual = self.receive(layer)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(partial(then, x, residual))

    def _receive(self, described: Sequence[int]) -> Tensor | None:
        code, *shape = described
        if code == _ABSENT:
            return None
        empty = torch.empty(shape, dtype=_DTYPES[code])
        return self._pair.broadcast(empty, self._sender) if empty.numel() else empty


def _described(tensor: Tensor | None) -> tuple[int, ...]:
    """Dtype and shape."""
    if tensor is None:
        return (_ABSENT, *(0 for _ in range(_DIMS)))
    return (_DTYPES.index(tensor.dtype), *tensor.shape)
