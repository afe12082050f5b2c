"""One rank's stage, and how the stream of hidden states comes to it and goes on from it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from headrace_core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.parallel import Communicator

T = TypeVar("T")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ABSENT = -1
"""Stands for the dtype of a tensor that is not there."""
_DIMS = 2
END_SECONDS = 1.0
"""Longest wait for the end of a thread, which may wait for a rank that does not come."""


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
    lane: int = 0
    """Its place among the ranks of the stage; what comes out is used in the first lane only."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class Stream(NamedTuple):
    """What goes from one stage to the next: a stream in two terms, see
    :class:`headrace_models.layers.decoder.Block`, and what it was before some layers."""

    x: Tensor
    """[R, H]."""
    residual: Tensor | None = None
    """[R, H]."""
    shown: Tensor | None = None
    """[n * T, H]: the stream before n layers that the first stage wants, one below the other."""


class _Wanted(NamedTuple):
    """A stream that is to come, and who waits for it."""

    receive: Callable[[], Stream]
    then: Callable[[Stream], Any]
    future: Future[Any]


class _Form(NamedTuple):
    """A tensor of a stream, whatever its number of rows."""

    dtype: torch.dtype
    width: int


class Link:
    """A way from one rank to another for a stream of hidden states.

    Args:
        pair: a group of two ranks.
        sender: the one that sends.
    """

    def __init__(self, pair: Communicator, sender: int = 0) -> None:
        self.pair, self._sender = pair, sender
        self._forms: tuple[_Form | None, ...] = ()
        """Of the two terms of the last stream with a header."""
        self._wanted: queue.SimpleQueue[_Wanted | None] = queue.SimpleQueue()
        self._receiver: threading.Thread | None = None

    def send(self, stream: Stream, layer: int) -> None:
        """Send a stream, and before it what it is like.

        Args:
            layer: number of layers that the stream has passed.
        """
        described = [number for tensor in stream for number in _described(tensor)]
        self.pair.broadcast(torch.tensor([layer, *described], dtype=torch.int64), self._sender)
        for tensor in stream:
            if tensor is not None and tensor.numel():
                self.pair.broadcast(tensor.contiguous(), self._sender)
        self._forms = _forms(stream)

    def receive(self, layer: int) -> Stream:
        """The next stream that comes.

        Args:
            layer: number of layers that it must have passed.

        Raises:
            ModelError: it has passed others: the two ranks have cut the model differently.
        """
        size = 1 + _DIMS
        header = self.pair.broadcast(
            torch.zeros(1 + size * len(Stream._fields), dtype=torch.int64), self._sender
        )
        passed, *described = header.tolist()
        if passed != layer:
            raise ModelError(
                f"a stage got a stream that has passed {passed} layers, and needs one after {layer}: the "
                "ranks have cut the model differently"
            )
        x, *others = (
            self._receive(described[start : start + size])
            for start in range(0, len(described), size)
        )
        assert x is not None
        stream = Stream(x, *others)
        self._forms = _forms(stream)
        return stream

    def send_alike(self, stream: Stream) -> None:
        """Send a stream without a header: one like the last, with one row at least. Can be recorded.

        Raises:
            ModelError: it is like another; and :meth:`receive_alike` is what the other rank must call.
        """
        if stream.shown is not None or _forms(stream) != self._forms:
            raise ModelError("a stage hands on a stream that is not like the last one")
        for tensor in stream:
            if tensor is not None:
                self.pair.broadcast(tensor.contiguous(), self._sender)

    def receive_alike(self, num_rows: int) -> Stream:
        """See :meth:`send_alike`."""
        if not self._forms:
            raise ModelError("no stream has come yet that the next one could be like")
        terms = [
            None if form is None else torch.empty(num_rows, form.width, dtype=form.dtype)
            for form in self._forms
        ]
        x, residual = (t if t is None else self.pair.broadcast(t, self._sender) for t in terms)
        assert x is not None
        return Stream(x, residual)

    def expect(
        self, receive: Callable[[], Stream], then: Callable[[Stream], Callable[[], T]]
    ) -> Future[Callable[[], T]]:
        """Receive in a thread of its own: the sender need not wait for who uses the stream.

        Args:
            receive: calls one of this link's methods; in the order of calls.
            then: makes the result of the stream, in that thread.
        """
        if self._receiver is None:
            self._receiver = threading.Thread(
                target=self._receive_all, name="headrace-stages", daemon=True
            )
            self._receiver.start()
        wanted = _Wanted(receive, then, Future())
        self._wanted.put(wanted)
        return wanted.future

    def close(self) -> None:
        """End the thread that receives, once nothing is expected. Idempotent."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._wanted.put(None)
            receiver.join(END_SECONDS)

    def _receive_all(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            receive, then, future = wanted
            try:
                result = then(receive())
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _receive(self, described: Sequence[int]) -> Tensor | None:
        code, *shape = described
        if code == _ABSENT:
            return None
        empty = torch.empty(shape, dtype=_DTYPES[code])
        return self.pair.broadcast(empty, self._sender) if empty.numel() else empty


def _forms(stream: Stream) -> tuple[_Form | None, ...]:
    """Of a stream's two terms."""
    terms = (stream.x, stream.residual)
    return tuple(None if t is None else _Form(t.dtype, t.shape[1]) for t in terms)


def _described(tensor: Tensor | None) -> tuple[int, ...]:
    """Dtype and shape."""
    if tensor is None:
        return (_ABSENT, *(0 for _ in range(_DIMS)))
    return (_DTYPES.index(tensor.dtype), *tensor.shape)
