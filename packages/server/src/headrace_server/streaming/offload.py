"""Work that would hold the event loop: done in a thread, in pieces between which the loop runs.

Everything large that the server makes or reads passes here: encoding log-probabilities of thousands
of tokens, parsing a long answer, decoding embeddings. A thread alone is not enough, as one call
into C keeps the interpreter's lock to its end; so large lists are encoded in slices
(:func:`encoded`, :func:`seal`). What is small is done at once: a thread would cost more.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from headrace_core.output import FlatLogprobs, Logprobs, RequestOutput

T = TypeVar("T")

LIGHT = 1024
"""Cost up to which work is done at once: some milliseconds. The unit is one log-probability."""
_CHARACTERS = 4
"""Characters of a text that is searched for calls and reasoning, for one unit of cost."""
_DECODED = 64
"""Characters of base64 for one unit."""
_THREADS = 2
"""Few: each may keep the interpreter's lock from the loop for one switch interval (5 ms)."""
_SLICE = 4
"""Positions whose log-probabilities are made and encoded at a time. As many as to stay below the
number of new objects at which the garbage collector begins to look at old ones (700)."""
_LONG = 256
"""Items of plain lists that are encoded at a time."""
PIECE = 1 << 18
"""Bytes of an answer that are handed to the socket at a time."""

_encoder = msgspec.json.Encoder()


class OffLoop:
    """``await off_loop(cost, work, *args)``: the result, computed on the loop or in a thread.

    ``work`` may use what belongs to its request: until it has ended the caller does not go on, not
    even if it is cancelled. What others use it changes through :meth:`back`.

    Args:
        light: most cost of work that is done at once.
    """

    def __init__(self, light: int = LIGHT) -> None:
        self.light = light
        self._pool = ThreadPoolExecutor(_THREADS, "headrace-offload")  # starts none before its use
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, cost: int, work: Callable[..., T], *args: Any) -> T:
        """Run ``work(*args)``.

        Args:
            cost: how much it is; above ``light`` it is done in a thread.

        Raises: what ``work`` raises.
        """
        if cost <= self.light:
            return work(*args)
        self._loop = asyncio.get_running_loop()
        running = self._pool.submit(work, *args)
        future = asyncio.wrap_future(running)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:
                # What waits in the queue need not begin; what runs is soon done.
                running.cancel()
                cancelled = error
        if cancelled is not None:
            if not future.cancelled():
                future.exception()  # nobody else will look at it
            raise cancelled
        return await future  # it is done

    def back(self, call: Callable[..., object], *args: Any) -> None:
        """From ``work``: call this on the loop, before the caller goes on and in order."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            assert self._loop is not None, "work runs in a thread only for a caller on a loop"
            self._loop.call_soon_threadsafe(call, *args)
        else:
            call(*args)

    def close(self) -> None:
        """End the threads, once they have done what they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def cost_of(output: RequestOutput) -> int:
    """Cost of making an output's events, or its part of an answer."""
    cost = 0
    if output.prompt_logprobs:
        cost += _entries(output.prompt_logprobs)
    for part in output.outputs:
        cost += len(part.text) // _CHARACTERS
        if part.logprobs:
            cost += _entries(part.logprobs)
    return cost


def _entries(positions: Logprobs) -> int:
    if isinstance(positions, FlatLogprobs):
        return len(positions.token_ids)
    # All positions have as many; a prompt's first has none.
    return len(positions) * len(positions[-1] or (0,))


def encoded(items: Iterable[Any], size: int = _SLICE) -> msgspec.Raw:
    """A list as JSON, encoded in slices of so many items.

    Items that are made as they are asked for never exist all at once: hundreds of thousands of
    objects would have the garbage collector stop every thread to look at them.
    """
    parts = [b"["]
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        parts += (_encoder.encode(batch)[1:-1], b",")
    parts[-1] = b"]" if len(parts) > 1 else b"[]"
    return msgspec.Raw(b"".join(parts))  # a large join lets other threads run


def pieces(data: bytes) -> Iterator[bytes]:
    """``data`` as it is sent: the socket's buffer is not filled with megabytes at once."""
    if len(data) <= PIECE:
        return iter((data,))
    return (data[at : at + PIECE] for at in range(0, len(data), PIECE))


def text_cost(*texts: str) -> int:
    """Cost of decoding texts, byte for byte."""
    return sum(map(len, texts)) // _DECODED


def seal(block: T) -> T:
    """Replace a struct's long lists by their JSON. They cannot be read any more."""
    for name in type(block).__struct_fields__:  # type: ignore[attr-defined]
        value = getattr(block, name)
        if isinstance(value, list) and len(value) > _LONG:
            setattr(block, name, encoded(value, _LONG))
    return block
